"""What carries out the machines' effects, for real or simulated."""
