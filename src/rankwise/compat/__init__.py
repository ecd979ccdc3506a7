"""Other packages' names over rankwise's parts."""
