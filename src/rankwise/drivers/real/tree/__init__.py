"""The real side of a tree of chip workers: arena, pipes, fork server, children, and the engine."""
