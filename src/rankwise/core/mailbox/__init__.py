"""What a parent and a worker say to each other: values, their bytes, the life of a request."""
