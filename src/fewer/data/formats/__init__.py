"""Readers of common file formats. Each takes a path and its own options, and returns a `RawDataset`."""
