"""The doors to the world: what drivers must offer, as small protocols."""
