"""How long, how big, how much energy: seconds, bytes and joules of the parts of a plan.

Pure functions of values; what was measured stands in for what is modelled where it is given.
"""
