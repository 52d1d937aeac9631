"""Optimizers that torch does not have: made for large models with little room.

Place in the flow: a user's factory makes one, as it makes any `torch.optim` optimizer. They import
nothing of the planner; the runtime knows them by what they say of themselves
(`runtime.optimizer`).
"""

from whale.optim.adafactor import Adafactor as Adafactor

__all__ = ["Adafactor"]
