"""The wire format between clients and server: messages, codecs, checks, and byte counts."""

from fewer.choices import Codec
from fewer.ledger import Direction, Ledger
from fewer.registry import CODECS
from fewer.wire.codecs import TensorCodec
from fewer.wire.message import Field, Number, Refused, Schema, Shaped, Value, decode, encode
from fewer.wire.tree import Tree, pack, unpack

__all__ = [
    "CODECS",
    "Codec",
    "Direction",
    "Field",
    "Ledger",
    "Number",
    "Refused",
    "Schema",
    "Shaped",
    "TensorCodec",
    "Tree",
    "Value",
    "decode",
    "encode",
    "pack",
    "unpack",
]
