"""What became of a simulated run: results, a table, a trace, a page."""
