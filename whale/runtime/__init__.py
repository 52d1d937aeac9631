"""Executes one rank's part of a Plan: groups, collectives, gradients, the executor.

Knows no planning.
"""
