"""The machines: protocols as plain objects, without I/O, clock or threads."""
