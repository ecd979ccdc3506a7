"""Making processes: the guardian, the fork server, and the agent's connections to them."""
