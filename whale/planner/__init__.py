"""ModelGraph + Cluster + Config -> Plan. Pure functions over values; no tensor is ever seen here."""
