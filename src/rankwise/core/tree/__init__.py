"""The machines of a tree of chip workers: the graph of its tasks, and the crew of its children."""
