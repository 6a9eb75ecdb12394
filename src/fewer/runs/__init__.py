"""A run: one training, recorded in a directory."""
