"""The agents of a job, under torch's names."""
