"""The command line: `main` finds the command, then one file per command does the work."""
