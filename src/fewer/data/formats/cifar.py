"""CIFAR-10 and CIFAR-100 in their Python (pickle) versions. The unpickler never calls a function named in a pickle."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from fewer.data.formats.readers import find_inside, iter_members, reader
from fewer.data.raw_dataset import Array, RawDataset
from fewer.errors import DataError, unknown_name
from fewer.registry import FORMATS

Labels = Literal["fine", "coarse", "fc100"]

FC100 = (1, 2, 3, 4, 5, 6, 9, 10, 15, 17, 18, 19), (8, 11, 13, 16), (0, 7, 12, 14)
"""Coarse classes for training, validation and testing (Oreshkin, Rodríguez López, Lacoste, NeurIPS 2018)."""


@FORMATS.register("cifar10")
@reader("CIFAR-10 (cifar-10-python.tar.gz or its contents)")
def read_cifar10(path: Path) -> RawDataset:
    """CIFAR-10: the archive, a directory that contains it, or the extracted files."""
    batches = [f"data_batch_{number}" for number in range(1, 6)]
    source = find_inside(path, "cifar-10-python.tar.gz", "cifar-10-batches-py")
    files = _read_files(source, [*batches, "test_batch"], "batches.meta")
    parts = [_extract_images(files[name], name, "labels") for name in (*batches, "test_batch")]
    x, y = (np.concatenate([part[i] for part in parts[:-1]]) for i in (0, 1))
    return RawDataset(x, y, parts[-1], class_names=_extract_names(files["batches.meta"], "label_names"))


@FORMATS.register("cifar100")
@reader("CIFAR-100 (cifar-100-python.tar.gz or its contents)")
def read_cifar100(path: Path, labels: Labels = "fine") -> RawDataset:
    """CIFAR-100 with 100 fine or 20 coarse classes: the archive, a directory that contains it, or the extracted files.

    `fc100` reorders the fine classes as in FC100, by coarse class: 60 for training, 20 for validation, 20 for testing.
    """
    if labels not in get_args(Labels):
        raise unknown_name("labels", labels, get_args(Labels))
    source = find_inside(path, "cifar-100-python.tar.gz", "cifar-100-python")
    files = _read_files(source, ["train", "test"], "meta")
    kind = "coarse" if labels == "coarse" else "fine"
    x, y = _extract_images(files["train"], "train", f"{kind}_labels")
    test = _extract_images(files["test"], "test", f"{kind}_labels")
    class_names = _extract_names(files["meta"], f"{kind}_label_names")
    if labels != "fc100":
        return RawDataset(x, y, test, class_names=class_names)
    coarse = _extract_images(files["train"], "train", "coarse_labels")[1]
    order = [fine for group in FC100 for label in group for fine in np.unique(y[coarse == label]).tolist()]
    if sorted(order) != list(range(100)):
        raise DataError(f"{path}: fine and coarse labels do not match (fc100 needs five fine classes per coarse class)")
    new_labels = np.argsort(order)
    names = tuple(class_names[fine] for fine in order)
    return RawDataset(x, new_labels[y], (test[0], new_labels[test[1]]), class_names=names)


def _read_files(path: Path, parts: list[str], meta: str) -> dict[str, dict[str, Any]]:
    """Reads the dictionaries in the named files."""
    needed = {*parts, meta}
    files = {
        name.rpartition("/")[2]: _unpickle(content, f"{path}: {name}")
        for name, content in iter_members(path, lambda name: name.rpartition("/")[2] in needed)
    }
    if missing := needed - files.keys():
        raise DataError(f"{path} has no {', '.join(sorted(missing))}")
    return files


def _extract_images(batch: dict[str, Any], name: str, labels: str) -> tuple[Array, Array]:
    for key in ("data", labels):
        if key not in batch:
            raise DataError(f"'{name}' has no '{key}' (it has: {', '.join(sorted(batch))})")
    data = batch["data"].value if isinstance(batch["data"], _PickledArray) else None
    if data is None or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise DataError(f"'{name}' has 'data' that is not an array of 3,072 bytes per image")
    values = batch[labels]
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise DataError(f"'{name}' has '{labels}' that is not a list of integers")
    return data.reshape(-1, 3, 32, 32), np.array(values, np.int64)


def _extract_names(meta: dict[str, Any], key: str) -> tuple[str, ...]:
    names = meta.get(key)
    if not isinstance(names, list) or not all(isinstance(name, str | bytes) for name in names):
        raise DataError(f"the meta file has no list '{key}' of names")
    return tuple(name.decode() if isinstance(name, bytes) else name for name in names)


# --- pickles --------------------------------------------------------------------------------------------------
#
# Names in a pickle resolve to the harmless stand-ins below, and only the operations that CIFAR needs are allowed. A
# pickle cannot call anything else, and deeply nested values are never hashed or compared.


class _PickledType:
    """Stands in for numpy.dtype."""

    def __init__(self, code: str | bytes, *_: Any) -> None:
        self.code = code.decode() if isinstance(code, bytes) else code
        if re.fullmatch("[iu][1248]", self.code) is None:
            raise DataError(f"a pickle holds an array of type '{self.code}' (allowed: integers)")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] in (">", b">"):
            self.code = f">{self.code}"


class _PickledArray:
    """Stands in for numpy.ndarray."""

    value: Array | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, content = state
        if not isinstance(dtype, _PickledType) or not isinstance(content, bytes):
            raise DataError("a pickle holds an array of values other than numbers")
        self.value = np.frombuffer(bytearray(content), dtype.code).reshape(shape, order="F" if fortran else "C")


def _reconstruct_array(*_: Any) -> _PickledArray:
    """Stands in for numpy's array constructor, and ignores its arguments."""
    return _PickledArray()


def _encode_latin1(characters: str, *_: Any) -> bytes:
    """Stands in for _codecs.encode, which Python 3 uses to pickle bytes for Python 2."""
    return characters.encode("latin-1")


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): None,
    ("numpy", "dtype"): _PickledType,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct_array,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct_array,
    ("_codecs", "encode"): _encode_latin1,
}
_OPERATIONS = """PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 STRING BINSTRING SHORT_BINSTRING
    BINBYTES SHORT_BINBYTES BINBYTES8 UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 EMPTY_LIST LIST APPEND APPENDS
    EMPTY_DICT DICT SETITEM SETITEMS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 PUT BINPUT LONG_BINPUT MEMOIZE
    GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD"""


def _make_operation(name: str) -> Callable[[Any], None]:
    """Returns the unpickler's function for an operation, with checks added."""
    dispatch = pickle._Unpickler.dispatch[getattr(pickle, name)[0]]

    def build_checked(unpickler: Any) -> None:
        if not isinstance(unpickler.stack[-2], _PickledArray | _PickledType):
            raise DataError("a pickle sets the state of an object that is not an array")
        dispatch(unpickler)

    def tuple_checked(unpickler: Any) -> None:
        dispatch(unpickler)
        if any(isinstance(inner, tuple) for item in unpickler.stack[-1] if isinstance(item, tuple) for inner in item):
            raise DataError("a pickle nests its tuples too deeply")

    return build_checked if name == "BUILD" else tuple_checked if name.startswith("TUPLE") else dispatch


class _Unpickler(pickle._Unpickler):
    dispatch = {getattr(pickle, name)[0]: _make_operation(name) for name in _OPERATIONS.split()}  # noqa: RUF012

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise DataError(f"a pickle imports {module}.{name} (allowed: arrays, dicts, lists, strings and numbers)")
        return _STAND_INS[module, name]


def _unpickle(content: bytes, where: str) -> dict[str, Any]:
    try:
        value = _Unpickler(BytesIO(content), encoding="bytes").load()
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{where} is damaged or not a pickle of plain data: {reason}") from error
    if not isinstance(value, dict) or not all(isinstance(key, str | bytes) for key in value):
        raise DataError(f"{where} is not a dictionary with string keys")
    return {key.decode() if isinstance(key, bytes) else key: entry for key, entry in value.items()}
