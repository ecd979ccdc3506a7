"""What goes wrong in simulations: one list of faults, one language, one reader."""
