"""Manifests: what an external scheduler reads to start the nodes of a job."""
