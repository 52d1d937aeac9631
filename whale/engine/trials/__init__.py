"""The user's code beside what would run in its place, before it is trusted."""
