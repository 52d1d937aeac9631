"""The whole model's tensors: gathered, saved, loaded under another plan."""

from whale.engine.checkpoint.checkpoint import read_state_dict as read_state_dict
