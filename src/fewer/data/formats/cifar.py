"""CIFAR-10 and CIFAR-100, binary or pickled. The unpickler never calls a function named in a pickle."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from fewer.data.formats.readers import Members, decode_text, find_inside, reader
from fewer.data.raw_dataset import Array, RawDataset
from fewer.errors import DataError, unknown_name
from fewer.registry import FORMATS

Labels = Literal["fine", "coarse", "fc100"]

FC100 = (1, 2, 3, 4, 5, 6, 9, 10, 15, 17, 18, 19), (8, 11, 13, 16), (0, 7, 12, 14)
"""Coarse classes for training, validation and testing (Oreshkin, Rodríguez López, Lacoste, NeurIPS 2018)."""
PIXELS = 3 * 32 * 32

Batch = tuple[Array, Array]
"""Images, and a row of labels for each kind of label."""


@FORMATS.register("cifar10")
@reader("CIFAR-10 (cifar-10-binary.tar.gz, cifar-10-python.tar.gz or their contents)")
def read_cifar10(path: Path) -> RawDataset:
    """CIFAR-10: an archive, a directory that contains it, or the extracted files."""
    parts = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    kinds = {"label": "batches.meta.txt"}
    (x, y), (test_x, test_y), names = _read_parts(path, "cifar-10", parts, kinds, "batches.meta")
    return RawDataset(x, y[0], (test_x, test_y[0]), class_names=names[0])


@FORMATS.register("cifar100")
@reader("CIFAR-100 (cifar-100-binary.tar.gz, cifar-100-python.tar.gz or their contents)")
def read_cifar100(path: Path, labels: Labels = "fine") -> RawDataset:
    """CIFAR-100 with 100 fine or 20 coarse classes: an archive, a directory that contains it, or the extracted files.

    `fc100` reorders the fine classes as in FC100, by coarse class: 60 for training, 20 for validation, 20 for testing.
    """
    if labels not in get_args(Labels):
        raise unknown_name("labels", labels, get_args(Labels))
    kinds = {"coarse_label": "coarse_label_names.txt", "fine_label": "fine_label_names.txt"}
    (x, y), (test_x, test_y), names = _read_parts(path, "cifar-100", ["train", "test"], kinds, "meta")
    if labels == "coarse":
        return RawDataset(x, y[0], (test_x, test_y[0]), class_names=names[0])
    order = list(range(len(names[1])))
    if labels == "fc100":
        order = [fine for group in FC100 for label in group for fine in np.unique(y[1][y[0] == label]).tolist()]
        if sorted(order) != list(range(100)):
            raise DataError(f"{path}: fine and coarse labels do not match (fc100 needs five fine per coarse class)")
    new_labels = np.argsort(order)
    class_names = tuple(names[1][fine] for fine in order)
    return RawDataset(x, new_labels[y[1]], (test_x, new_labels[test_y[1]]), class_names=class_names)


def _read_parts(
    path: Path, dataset: str, parts: Sequence[str], kinds: Mapping[str, str], meta: str
) -> tuple[Batch, Batch, list[tuple[str, ...]]]:
    """Reads the training data (all parts but the last), the test data, and the names of classes by kind of label.

    `kinds` maps the kinds of label, in the order of a binary record, to the files of their names. A pickled version has
    all names in one file `meta`.
    """
    suffixes = ("binary.tar.gz", "binary", "batches-bin", "python.tar.gz", "python", "batches-py")
    path = find_inside(path, *(f"{dataset}-{suffix}" for suffix in suffixes))
    binary, pickled = {*(f"{part}.bin" for part in parts), *kinds.values()}, {*parts, meta}
    files = Members(path, lambda name: name.rpartition("/")[2] in binary | pickled)
    if not files:
        raise DataError(f"{path} has neither {dataset}-binary.tar.gz nor {dataset}-python.tar.gz, nor their contents")
    needed = binary if binary & files.keys() else pickled
    if missing := needed - files.keys():
        raise DataError(f"{path} has no {', '.join(sorted(missing))}")
    if needed is binary:
        batches = [_parse_records(files[f"{part}.bin"], len(kinds), f"{path}: {part}.bin") for part in parts]
        names = [tuple(decode_text(files[file], f"{path}: {file}").split()) for file in kinds.values()]
    else:
        tables = {name: _unpickle(files[name], f"{path}: {name}") for name in pickled}
        batches = [_parse_table(tables[part], [f"{kind}s" for kind in kinds], part) for part in parts]
        names = [_parse_names(tables[meta], f"{kind}_names") for kind in kinds]
    images, labels = zip(*batches[:-1], strict=True)
    return (np.concatenate(images), np.concatenate(labels, axis=1)), batches[-1], names


def _parse_records(content: bytes, kinds: int, where: str) -> Batch:
    """Parses a binary batch: records of a byte for each kind of label, and the pixels."""
    if len(content) % (kinds + PIXELS):
        raise DataError(f"{where} has {len(content)} bytes (allowed: a multiple of {kinds + PIXELS})")
    records = np.frombuffer(content, np.uint8).reshape(-1, kinds + PIXELS)
    return records[:, kinds:].copy().reshape(-1, 3, 32, 32), records[:, :kinds].T.astype(np.int64, order="C")


def _parse_table(table: Mapping[str, Any], label_keys: Sequence[str], name: str) -> Batch:
    """Parses an unpickled batch."""
    for key in ("data", *label_keys):
        if key not in table:
            raise DataError(f"'{name}' has no '{key}' (it has: {', '.join(sorted(table))})")
    data = table["data"].value if isinstance(table["data"], _PickledArray) else None
    if data is None or data.ndim != 2 or data.shape[1] != PIXELS:
        raise DataError(f"'{name}' has 'data' that is not an array of 3,072 bytes per image")
    for key in label_keys:
        if not isinstance(table[key], list) or not all(isinstance(value, int) for value in table[key]):
            raise DataError(f"'{name}' has '{key}' that is not a list of integers")
    return data.reshape(-1, 3, 32, 32), np.array([table[key] for key in label_keys], np.int64)


def _parse_names(meta: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = meta.get(key)
    if not isinstance(names, list) or not all(isinstance(name, str | bytes) for name in names):
        raise DataError(f"the meta file has no list '{key}' of names")
    return tuple(name.decode() if isinstance(name, bytes) else name for name in names)


# --- pickles --------------------------------------------------------------------------------------------------
#
# Names in a pickle resolve to harmless stand-ins, and only the operations that CIFAR needs are allowed. A pickle cannot
# call anything else, and deeply nested values are never hashed or compared.


class _PickledArray:
    """Stands in for numpy.ndarray, and for the numpy.dtype of its bytes, whose state it ignores."""

    value: Array | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if len(state) == 5:
            _, shape, _, fortran, content = state
            self.value = np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C").copy()


def _stand_in_for_dtype(code: str | bytes, *_: Any) -> _PickledArray:
    if code not in ("u1", b"u1"):
        raise DataError(f"a pickle holds an array of type {code!r} (allowed: 'u1')")
    return _PickledArray()


_OPERATIONS = """PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 STRING BINSTRING SHORT_BINSTRING
    BINBYTES SHORT_BINBYTES BINBYTES8 UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 EMPTY_LIST LIST APPEND APPENDS
    EMPTY_DICT DICT SETITEM SETITEMS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 PUT BINPUT LONG_BINPUT MEMOIZE
    GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD"""


def _make_operation(name: str) -> Callable[[Any], None]:
    """Returns the unpickler's function for an operation. Tuples are checked."""
    operation = pickle._Unpickler.dispatch[getattr(pickle, name)[0]]

    def make_tuple(unpickler: Any) -> None:
        operation(unpickler)
        if any(isinstance(inner, tuple) for item in unpickler.stack[-1] if isinstance(item, tuple) for inner in item):
            raise DataError("a pickle nests its tuples too deeply")

    return make_tuple if name.startswith("TUPLE") else operation


class _Unpickler(pickle._Unpickler):
    dispatch = {getattr(pickle, name)[0]: _make_operation(name) for name in _OPERATIONS.split()}  # noqa: RUF012

    def find_class(self, module: str, name: str) -> Any:
        match module, name:  # a new function each time, since a pickle may set attributes
            case "numpy", "ndarray":
                return None
            case "numpy", "dtype":
                return lambda *args: _stand_in_for_dtype(*args)
            case "numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct":
                return lambda *_: _PickledArray()
            case "_codecs", "encode":  # Python 3 pickles bytes for Python 2 so
                return lambda characters, *_: characters.encode("latin-1")
        raise DataError(f"a pickle imports {module}.{name} (allowed: arrays, dicts, lists, strings and numbers)")


def _unpickle(content: bytes, where: str) -> dict[str, Any]:
    try:
        value = _Unpickler(BytesIO(content), encoding="bytes").load()
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{where} is damaged or not a pickle of plain data: {reason}") from error
    if not isinstance(value, dict) or not all(isinstance(key, str | bytes) for key in value):
        raise DataError(f"{where} is not a dictionary with string keys")
    return {key.decode() if isinstance(key, bytes) else key: entry for key, entry in value.items()}
