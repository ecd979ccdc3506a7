"""Stores for nodes that share no memory: one port, several engines."""
