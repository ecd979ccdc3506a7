"""The real side of a tree of chip workers: arena, pipes, zygote, children, and the engine."""
