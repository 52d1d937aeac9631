"""The user's forward written down on fake tensors: operations, draws, readers, work."""
