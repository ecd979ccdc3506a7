"""What runs inside workers, and what they send back."""
