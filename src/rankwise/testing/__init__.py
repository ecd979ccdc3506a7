"""What tests are made of, for rankwise's own and for those of plug-in authors."""
