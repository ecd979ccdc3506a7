"""A whole cluster in one process: agents and their workers, a store, a network, and faults."""
