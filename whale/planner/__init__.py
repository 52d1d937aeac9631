"""ModelGraph + Cluster + Config -> Plan. Pure functions over values.

No tensor is ever seen here.
"""
