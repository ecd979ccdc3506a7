"""What runs leave behind, read and told: records in journals, and timelines made of them."""
