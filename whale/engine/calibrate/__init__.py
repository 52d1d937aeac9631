"""Measured speeds of this job's devices and links."""
