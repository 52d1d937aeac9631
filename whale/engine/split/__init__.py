"""Which modules can be cut, where, and what stands in for their forward."""
