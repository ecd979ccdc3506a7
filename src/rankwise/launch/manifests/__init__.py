"""Manifests: what somebody else's scheduler reads to start the nodes of a job."""
