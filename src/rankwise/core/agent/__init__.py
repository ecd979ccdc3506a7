"""The life of a node: joins rounds, runs a gang in each, tells what became of the job."""
