"""Report -> something to look at: a table, a trace, a page. Draws only, decides nothing."""
