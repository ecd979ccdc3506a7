"""What is looked at while a run goes on: calls, hangs, lateness, GPUs."""
