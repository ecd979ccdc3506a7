"""Runs the nodes of a job on a Ray cluster; needs the extra `ray`, imported only when asked for."""
