"""The algorithms that ship, one module each; a user's own module serves as well."""
