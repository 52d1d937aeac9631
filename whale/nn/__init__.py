"""Layers that compute the same on one device and on many. `MoE` is for users."""

from whale.nn.moe.layer import MoE

__all__ = ["MoE"]
