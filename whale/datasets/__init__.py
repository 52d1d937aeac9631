"""Pictures and texts to learn from, how they are mixed, and how what was learnt is scored."""
