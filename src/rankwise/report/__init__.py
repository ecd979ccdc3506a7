"""What people are shown of a run afterwards: one HTML page."""
