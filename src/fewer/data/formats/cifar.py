"""CIFAR-10 and CIFAR-100 as pickled for Python, read without ever calling what a pickle names."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from fewer.data.formats.readers import inside, members, reader
from fewer.data.raw_dataset import Array, RawDataset
from fewer.errors import DataError, unknown
from fewer.registry import FORMATS

Labels = Literal["fine", "coarse", "fc100"]

FC100 = (1, 2, 3, 4, 5, 6, 9, 10, 15, 17, 18, 19), (8, 11, 13, 16), (0, 7, 12, 14)
"""Coarse classes to train on, to validate on and to test on (Oreshkin, Rodríguez López, Lacoste, NeurIPS 2018)."""


@FORMATS.register("cifar10")
@reader("CIFAR-10 (cifar-10-python.tar.gz or what it holds)")
def cifar10(path: Path) -> RawDataset:
    """CIFAR-10: the archive, a directory that holds it, or what was unpacked from it."""
    batches = [f"data_batch_{number}" for number in range(1, 6)]
    files = _files(
        inside(path, "cifar-10-python.tar.gz", "cifar-10-batches-py"), [*batches, "test_batch"], "batches.meta"
    )
    parts = [_images(files[name], name, "labels") for name in (*batches, "test_batch")]
    x, y = (np.concatenate([part[i] for part in parts[:-1]]) for i in (0, 1))
    return RawDataset(x, y, parts[-1], names=_names(files["batches.meta"], "label_names"))


@FORMATS.register("cifar100")
@reader("CIFAR-100 (cifar-100-python.tar.gz or what it holds)")
def cifar100(path: Path, labels: Labels = "fine") -> RawDataset:
    """CIFAR-100 with its 100 fine or 20 coarse classes: the archive, a directory that holds it, or its contents.

    `fc100` are the fine classes in the order of FC100, by coarse class: 60 to train on, 20 to validate, 20 to test on.
    """
    if labels not in get_args(Labels):
        raise unknown("labels", labels, get_args(Labels))
    files = _files(inside(path, "cifar-100-python.tar.gz", "cifar-100-python"), ["train", "test"], "meta")
    kind = "coarse" if labels == "coarse" else "fine"
    x, y = _images(files["train"], "train", f"{kind}_labels")
    test = _images(files["test"], "test", f"{kind}_labels")
    names = _names(files["meta"], f"{kind}_label_names")
    if labels != "fc100":
        return RawDataset(x, y, test, names=names)
    coarse = _images(files["train"], "train", "coarse_labels")[1]
    order = [c for group in FC100 for big in group for c in np.unique(y[coarse == big]).tolist()]
    if sorted(order) != list(range(100)):
        raise DataError(f"{path}: fine and coarse labels do not fit together (fc100 needs five fine in each coarse)")
    numbers = np.argsort(order)
    return RawDataset(x, numbers[y], (test[0], numbers[test[1]]), names=tuple(names[c] for c in order))


def _files(path: Path, parts: list[str], meta: str) -> dict[str, dict[str, Any]]:
    """The dictionaries in the named files."""
    needed = {*parts, meta}
    found = {
        name.rpartition("/")[2]: _dictionary(raw, f"{path}: {name}")
        for name, raw in members(path, lambda name: name.rpartition("/")[2] in needed)
    }
    if missing := needed - found.keys():
        raise DataError(f"{path} has no {', '.join(sorted(missing))}")
    return found


def _images(batch: dict[str, Any], name: str, labels: str) -> tuple[Array, Array]:
    for key in ("data", labels):
        if key not in batch:
            raise DataError(f"'{name}' has no '{key}' (it has: {', '.join(sorted(batch))})")
    data = batch["data"].value if isinstance(batch["data"], _PickledArray) else None
    if data is None or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise DataError(f"'{name}' has 'data' that is not an array of 3,072 bytes for each image")
    numbers = batch[labels]
    if not isinstance(numbers, list) or not all(isinstance(number, int) for number in numbers):
        raise DataError(f"'{name}' has '{labels}' that are not a list of whole numbers")
    return data.reshape(-1, 3, 32, 32), np.array(numbers, np.int64)


def _names(meta: dict[str, Any], key: str) -> tuple[str, ...]:
    names = meta.get(key)
    if not isinstance(names, list) or not all(isinstance(name, str | bytes) for name in names):
        raise DataError(f"the meta file has no list '{key}' of names")
    return tuple(name.decode() if isinstance(name, bytes) else name for name in names)


# --- pickles --------------------------------------------------------------------------------------------------
#
# The names in a pickle stand for our own harmless functions, never for what they name, and only the operations that
# the files need are there. So nothing can be called, and nothing nested deeply can be hashed or compared.


class _PickledType:
    """Stands for numpy.dtype."""

    def __init__(self, code: str | bytes, *_: Any) -> None:
        self.code = code.decode() if isinstance(code, bytes) else code
        if re.fullmatch("[iu][1248]", self.code) is None:
            raise DataError(f"a pickle holds an array of type '{self.code}' (allowed: whole numbers)")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] in (">", b">"):
            self.code = f">{self.code}"


class _PickledArray:
    """Stands for numpy.ndarray."""

    value: Array | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, raw = state
        if not isinstance(kind, _PickledType) or not isinstance(raw, bytes):
            raise DataError("a pickle holds an array of something other than numbers")
        self.value = np.frombuffer(bytearray(raw), kind.code).reshape(shape, order="F" if fortran else "C")


def _new_array(*_: Any) -> _PickledArray:
    """Stands for what makes an empty array, whatever its arguments."""
    return _PickledArray()


def _encode(characters: str, *_: Any) -> bytes:
    """Stands for _codecs.encode, with which Python 3 writes bytes for Python 2."""
    return characters.encode("latin-1")


_STANDS_FOR: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): None,
    ("numpy", "dtype"): _PickledType,
    ("numpy.core.multiarray", "_reconstruct"): _new_array,
    ("numpy._core.multiarray", "_reconstruct"): _new_array,
    ("_codecs", "encode"): _encode,
}
_OPERATIONS = """PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 STRING BINSTRING SHORT_BINSTRING
    BINBYTES SHORT_BINBYTES BINBYTES8 UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 EMPTY_LIST LIST APPEND APPENDS
    EMPTY_DICT DICT SETITEM SETITEMS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 PUT BINPUT LONG_BINPUT MEMOIZE
    GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD"""


def _operation(name: str) -> Callable[[Any], None]:
    """What the unpickler does at this operation."""
    usual = pickle._Unpickler.dispatch[getattr(pickle, name)[0]]

    def build(machine: Any) -> None:
        if not isinstance(machine.stack[-2], _PickledArray | _PickledType):
            raise DataError("a pickle sets the state of something other than an array")
        usual(machine)

    def shallow_tuple(machine: Any) -> None:
        usual(machine)
        if any(isinstance(inner, tuple) for item in machine.stack[-1] if isinstance(item, tuple) for inner in item):
            raise DataError("a pickle nests its tuples too deeply")

    return build if name == "BUILD" else shallow_tuple if name.startswith("TUPLE") else usual


class _Unpickler(pickle._Unpickler):
    dispatch = {getattr(pickle, name)[0]: _operation(name) for name in _OPERATIONS.split()}  # noqa: RUF012

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STANDS_FOR:
            raise DataError(f"a pickle names {module}.{name} (allowed: arrays, dictionaries, lists, texts and numbers)")
        return _STANDS_FOR[module, name]


def _dictionary(raw: bytes, where: str) -> dict[str, Any]:
    try:
        value = _Unpickler(BytesIO(raw), encoding="bytes").load()
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{where} is damaged or not a pickle of plain data: {reason}") from error
    if not isinstance(value, dict) or not all(isinstance(key, str | bytes) for key in value):
        raise DataError(f"{where} is not a dictionary of named entries")
    return {key.decode() if isinstance(key, bytes) else key: entry for key, entry in value.items()}
