"""`python -m rankwise`: the command, where its script is not in PATH."""

from rankwise.cli.start import start

start()
