"""Simulated runs of task graphs: random graphs, mortal children, and a sequential reference."""
