"""What a parent and a chip worker say to each other: values, their bytes, a request's life."""
