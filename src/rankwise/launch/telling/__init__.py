"""What users are told: notices, failures, outcomes."""
