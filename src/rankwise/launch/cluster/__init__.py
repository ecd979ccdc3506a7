"""A run on several nodes: this node's agent, from options to an outcome."""
