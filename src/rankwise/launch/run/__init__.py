"""A run while it lasts: what it is, its session, the processes of a node."""
