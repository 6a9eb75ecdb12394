"""Nested containers of tensors and plain values as bytes: safetensors and JSON, never pickle.

Checkpoints and the private state of clients use this format on disk.
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
    """Serializes a tree. `unpack` restores its tensors bit for bit."""
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_strip_tensors(tree, tensors), separators=(",", ":"))
    # One metadata key only: safetensors writes several in random order.
    return safetensors.torch.save(tensors, {"tree": checksum(structure, tensors) + structure})


def unpack(blob: bytes) -> Tree:
    """Restores the tree that `pack` wrote. Raises ValueError if the bytes are not such a tree."""
    try:
        tensors = safetensors.torch.load(blob)
        header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])["__metadata__"]["tree"]
        expected, structure = header[:8], header[8:]
        if checksum(structure, tensors) != expected:
            raise ValueError("checksum does not match")
        return _insert_tensors(json.loads(structure), tensors)
    except Exception as error:  # the parsers raise all kinds of exceptions on damaged bytes
        raise ValueError(f"not a tree of tensors: {str(error).partition(chr(10))[0]}") from error


def _strip_tensors(node: Tree, tensors: dict[str, Tensor]) -> Any:
    """Converts the tree to JSON, with containers and tensors as [tag, content] pairs. Moves tensors to `tensors`."""
    if isinstance(node, Tensor):
        name = str(len(tensors))
        tensors[name] = node.detach().cpu().clone(memory_format=torch.contiguous_format)
        return ["tensor", name]
    if isinstance(node, Mapping):
        if invalid := [key for key in node if not isinstance(key, str | int)]:
            raise TypeError(f"cannot store a dict key of type {type(invalid[0]).__name__} (allowed: str, int)")
        return ["dict", [[key, _strip_tensors(value, tensors)] for key, value in node.items()]]
    if isinstance(node, list | tuple):
        return ["tuple" if isinstance(node, tuple) else "list", [_strip_tensors(value, tensors) for value in node]]
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise TypeError(
        f"cannot store a value of type {type(node).__name__} (allowed: tensors, numbers, text and containers of them)"
    )


def _insert_tensors(node: Any, tensors: Mapping[str, Tensor]) -> Tree:
    if not isinstance(node, list):
        return node
    tag, content = node
    if tag == "tensor":
        return tensors[content]
    if tag == "dict":
        return {key: _insert_tensors(value, tensors) for key, value in content}
    if tag not in ("list", "tuple"):
        raise ValueError(f"unknown container '{tag}'")
    items = [_insert_tensors(value, tensors) for value in content]
    return tuple(items) if tag == "tuple" else items
