"""The machines of a tree of chip workers: the graph of its tasks, and the group of its children."""
