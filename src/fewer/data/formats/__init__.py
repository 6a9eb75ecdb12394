"""Readers of common file formats. Each takes a path and options, and returns a `RawDataset`."""
