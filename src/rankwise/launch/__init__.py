"""The composition root: from a job to its outcome."""
