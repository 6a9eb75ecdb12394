"""Federated data: samples, partitions among clients, built-in data sets, and user arrays."""

from fewer.data.federated import ArrayData, ClientData, Data, federate, from_arrays, from_clients, from_dataset
from fewer.data.raw_dataset import RawDataset
from fewer.data.samples import Samples
from fewer.data.schema import Column, Schema
from fewer.data.sources import NAMES, load

__all__ = [
    "NAMES",
    "ArrayData",
    "ClientData",
    "Column",
    "Data",
    "RawDataset",
    "Samples",
    "Schema",
    "federate",
    "from_arrays",
    "from_clients",
    "from_dataset",
    "load",
]
