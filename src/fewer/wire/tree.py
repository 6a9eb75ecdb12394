"""Nested containers of tensors and plain values as bytes: safetensors + JSON, never pickle.

Used for what is kept on disk: a server's checkpoint and a client's private state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from fewer.wire.codecs import checksum

Tree = Any
"""Tensors, None, bool, int, float, str, and dicts (keys str or int), lists and tuples of them."""


def pack(tree: Tree) -> bytes:
    """Bytes from which `unpack` rebuilds the tree, tensors bit for bit."""
    tensors: dict[str, Tensor] = {}
    shape = json.dumps(_strip(tree, tensors), separators=(",", ":"))
    return safetensors.torch.save(tensors, {"tree": checksum(shape, tensors) + shape})  # one key: their order is random


def unpack(blob: bytes) -> Tree:
    """The tree that `pack` wrote; ValueError where the bytes are not such a tree."""
    try:
        tensors = safetensors.torch.load(blob)
        header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])["__metadata__"]["tree"]
        told, shape = header[:8], header[8:]
        if checksum(shape, tensors) != told:
            raise ValueError("checksum does not match")
        return _fill(json.loads(shape), tensors)
    except Exception as error:  # whatever the parsers raise at damaged bytes
        raise ValueError(f"not a tree of tensors: {str(error).partition(chr(10))[0]}") from error


def _strip(node: Tree, tensors: dict[str, Tensor]) -> Any:
    """The tree as JSON, each tensor replaced by its number; lists are marked to tell them from tags."""
    if isinstance(node, Tensor):
        name = str(len(tensors))
        tensors[name] = node.detach().cpu().clone(memory_format=torch.contiguous_format)
        return ["tensor", name]
    if isinstance(node, Mapping):
        if odd := [key for key in node if not isinstance(key, str | int)]:
            raise TypeError(f"cannot be kept: a dict with a key of type {type(odd[0]).__name__} (only text and int)")
        return ["dict", [[key, _strip(value, tensors)] for key, value in node.items()]]
    if isinstance(node, list | tuple):
        return ["tuple" if isinstance(node, tuple) else "list", [_strip(value, tensors) for value in node]]
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise TypeError(f"cannot be kept: {type(node).__name__} (only tensors, numbers, text and containers of them)")


def _fill(node: Any, tensors: Mapping[str, Tensor]) -> Tree:
    if not isinstance(node, list):
        return node
    tag, content = node
    if tag == "tensor":
        return tensors[content]
    if tag == "dict":
        return {key: _fill(value, tensors) for key, value in content}
    if tag not in ("list", "tuple"):
        raise ValueError(f"'{tag}' is no container")
    items = [_fill(value, tensors) for value in content]
    return tuple(items) if tag == "tuple" else items
