"""Runs a job on simulated ranks: threads of this process, in virtual time.

Everything else is as on real processes: the agent decides what follows from a failure, and
output, log files and the report are those of a real run.
"""
