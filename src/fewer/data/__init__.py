"""What parties hold: samples, the ways to divide them, the embedded sets, and a user's own arrays."""

from fewer.data.federated import ArrayData, Data, PartyData, from_arrays, from_parties
from fewer.data.samples import Samples
from fewer.data.sources import NAMES, load

__all__ = ["NAMES", "ArrayData", "Data", "PartyData", "Samples", "from_arrays", "from_parties", "load"]
