"""What parties hold: samples, the ways to divide them, the embedded sets, and a user's own arrays."""

from fewer.data.federated import ArrayData, Data, PartyData, federate, from_arrays, from_dataset, from_parties
from fewer.data.raw import Raw
from fewer.data.samples import Samples
from fewer.data.sources import NAMES, load

__all__ = [
    "NAMES",
    "ArrayData",
    "Data",
    "PartyData",
    "Raw",
    "Samples",
    "federate",
    "from_arrays",
    "from_dataset",
    "from_parties",
    "load",
]
