"""Mixture of experts: who computes what, and the fast products under it."""
