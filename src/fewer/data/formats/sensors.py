"""Activity recognition from body-worn sensors: PAMAP2, UCI HAR and HAPT. A client is a subject."""

from __future__ import annotations

import re
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fewer.data.formats.readers import Members, find_inside, reader
from fewer.data.raw_dataset import RawDataset
from fewer.errors import DataError, SettingError
from fewer.registry import FORMATS

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

_ACTIVITIES = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "lying")
_TRANSITIONS = ("stand to sit", "sit to stand", "sit to lie", "lie to sit", "stand to lie", "lie to stand")
_PAMAP2 = {
    1: "lying", 2: "sitting", 3: "standing", 4: "walking", 5: "running", 6: "cycling", 7: "Nordic walking",
    9: "watching TV", 10: "computer work", 11: "car driving", 12: "ascending stairs", 13: "descending stairs",
    16: "vacuum cleaning", 17: "ironing", 18: "folding laundry", 19: "house cleaning", 20: "playing soccer",
    24: "rope jumping",
}  # fmt: skip
_PAMAP2_COLUMNS = 54
_HEART_RATE = 2
_UNITS = (3, 20, 37)
"""First columns of the three inertial units: temperature, two accelerometers, gyroscope, magnetometer, orientation."""
_CHANNELS = (_HEART_RATE, *(start + offset for start in _UNITS for offset in range(13)))
"""All channels but orientation, which the authors of PAMAP2 call invalid."""


@FORMATS.register("pamap2")
@reader("PAMAP2 (Protocol/subjectNNN.dat)")
def read_pamap2(path: Path, window: int = 128, stride: int = 64, standardize: bool = True) -> RawDataset:
    """Windows of heart rate and three inertial units (40 channels, 100 Hz), each within one activity.

    Missing values are interpolated in time. Classes are the activities that occur, in the order of their ids.
    `standardize` gives each channel mean 0 and standard deviation 1 over all windows, because their scales differ.
    """
    _check_window(window, stride)
    files = sorted(find_inside(path, "Protocol", "PAMAP2_Dataset/Protocol").glob("subject*.dat"))
    if not files:
        raise DataError(f"no subjectNNN.dat in {path} (expected: Protocol/subject101.dat, …)")
    x, activities, subjects = [], [], []
    for file in files:
        subject = file.stem.removeprefix("subject")
        if not subject.isdecimal():
            raise DataError(f"{file} does not name a subject (expected: subjectNNN.dat)")
        table = _parse_numbers(file.read_bytes(), str(file))
        if table.shape[1] != _PAMAP2_COLUMNS:
            raise DataError(f"{file} has {table.shape[1]} columns, expected {_PAMAP2_COLUMNS}")
        starts, activity = _find_windows(table[:, 1].astype(np.int64), window, stride)
        x.append(_cut_windows(_interpolate(table[:, _CHANNELS], str(file)), starts[activity > 0], window))
        activities.append(activity[activity > 0])
        subjects.append(np.full(len(activities[-1]), int(subject)))
    inputs = np.concatenate(x)
    present, y = np.unique(np.concatenate(activities), return_inverse=True)
    if invalid := sorted(set(present.tolist()) - _PAMAP2.keys()):
        raise DataError(f"{path} has activity {invalid[0]} (allowed: {', '.join(map(str, _PAMAP2))})")
    if standardize and len(inputs):
        inputs -= inputs.mean(axis=(0, 2), keepdims=True, dtype=np.float64).astype(np.float32)
        inputs /= np.maximum(inputs.std(axis=(0, 2), keepdims=True, dtype=np.float64), 1e-6).astype(np.float32)
    names, clients = tuple(_PAMAP2[activity] for activity in present.tolist()), np.concatenate(subjects)
    y, gap = y.astype(np.int64), (window - 1) // stride
    return RawDataset(inputs, y, client_ids=clients, class_names=names, time_ordered=True, class_gap=gap)


@FORMATS.register("har")
@reader("UCI HAR (UCI HAR Dataset with its Inertial Signals)")
def read_har(path: Path) -> RawDataset:
    """Windows of 128 readings of nine signals, unchanged; test subjects differ from training subjects.

    Neighboring windows overlap by half.
    """
    path = find_inside(path, "UCI HAR Dataset", "UCI HAR Dataset.zip", "har.zip")
    wanted = re.compile(r"(?:.*/)?(?:train|test)/(?:Inertial Signals/\w+|[yY]_\w+|subject_\w+)\.txt")
    files = Members(path, lambda name: wanted.fullmatch(name) is not None and "__MACOSX" not in name)
    signals = [f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"]
    parts = []
    for part in ("train", "test"):
        channels = [_parse_member(files, f"{signal}_{part}.txt") for signal in signals]
        if len({channel.shape for channel in channels}) > 1:
            raise DataError(f"{path} has {part} signals of unequal lengths")
        tables = (_parse_member(files, f"{kind}_{part}.txt") for kind in ("y", "subject"))
        labels, subjects = (table[:, 0].astype(np.int64) for table in tables)
        parts.append((np.stack(channels, axis=1), labels - 1, subjects))
    (x, y, subjects), (test_x, test_y, test_subjects) = parts
    return RawDataset(x, y, (test_x, test_y), subjects, test_subjects, _ACTIVITIES, time_ordered=True, class_gap=1)


@FORMATS.register("hapt")
@reader("HAPT (RawData with acc_expNN_userNN.txt, gyro_expNN_userNN.txt and labels.txt)")
def read_hapt(path: Path, window: int = 128, stride: int = 64, transitions: bool = False) -> RawDataset:
    """Windows of accelerometer and gyroscope (6 channels, 50 Hz), each within one labeled interval.

    `transitions` adds the six changes of posture as classes.
    """
    _check_window(window, stride)
    path = find_inside(path, "RawData", "HAPT Data Set.zip", "HAPT Data Set/RawData")
    wanted = re.compile(r"(?:.*/)?(?:RawData/)?(?:(?:acc|gyro)_exp\d+_user\d+|labels)\.txt")
    files = Members(path, lambda name: bool(wanted.fullmatch(name)))
    labels = _parse_member(files, "labels.txt").astype(np.int64)
    if labels.shape[1] != 5:
        raise DataError(
            f"{path}: labels.txt has {labels.shape[1]} columns (expected: experiment user activity start end)"
        )
    class_names = _ACTIVITIES + _TRANSITIONS
    x, y, subjects = [], [], []
    for experiment, user in sorted({(row[0], row[1]) for row in labels.tolist()}):
        series = _read_experiment(files, f"exp{experiment:02}_user{user:02}.txt")
        for _, _, activity, first, last in labels[(labels[:, :2] == (experiment, user)).all(axis=1)].tolist():
            if not (1 <= activity <= len(class_names) and 1 <= first <= last <= len(series)):
                row = f"{experiment} {user} {activity} {first} {last}"
                raise DataError(
                    f"{path}: labels.txt has '{row}' (allowed: activities 1 to 12, within {len(series)} rows)"
                )
            if activity <= len(_ACTIVITIES) or transitions:
                starts = np.arange(first - 1, last - window + 1, stride)
                x.append(_cut_windows(series, starts, window))
                y.append(np.full(len(starts), activity - 1))
                subjects.append(np.full(len(starts), user))
    inputs, labels, clients = map(np.concatenate, (x, y, subjects))
    names = class_names if transitions else _ACTIVITIES
    gap = (window - 1) // stride
    return RawDataset(inputs, labels, client_ids=clients, class_names=names, time_ordered=True, class_gap=gap)


def _read_experiment(files: Members, name: str) -> Floats:
    """Reads both sensors of one experiment: (time, channels)."""
    acc, gyro = (_parse_member(files, f"{kind}_{name}") for kind in ("acc", "gyro"))
    if acc.shape != gyro.shape or acc.shape[1] != 3:
        raise DataError(f"{files.path}: acc_{name} and gyro_{name} have shapes {acc.shape} and {gyro.shape}")
    return np.concatenate([acc, gyro], axis=1)


# --- series and windows ---------------------------------------------------------------------------------------


def _check_window(window: int, stride: int) -> None:
    if window < 1 or stride < 1:
        raise SettingError(f"window and stride must be >= 1, got {window} and {stride}")


def _parse_member(files: Members, name: str) -> Floats:
    return _parse_numbers(files[name], f"{files.path}: {name}")


def _parse_numbers(content: bytes, where: str) -> Floats:
    """Parses a table of numbers separated by spaces."""
    if not content.strip():
        raise DataError(f"{where} is empty")
    try:
        return np.loadtxt(BytesIO(content), np.float32, ndmin=2, comments=None)
    except ValueError as error:
        raise DataError(f"{where} is not a table of numbers: {error}") from error


def _interpolate(series: Floats, where: str) -> Floats:
    """Fills missing values by linear interpolation in time."""
    rows = np.arange(len(series))
    for column, values in enumerate(series.T):
        present = np.isfinite(values)
        if not present.any():
            raise DataError(f"{where} has no values in channel {column}")
        if not present.all():
            series[~present, column] = np.interp(rows[~present], rows[present], values[present])
    return series


def _find_windows(activity: Integers, window: int, stride: int) -> tuple[Integers, Integers]:
    """Returns the starts of all windows within a single activity, and that activity."""
    starts = np.arange(0, len(activity) - window + 1, stride)
    changes = np.concatenate([[0], np.cumsum(activity[1:] != activity[:-1])])
    starts = starts[changes[starts] == changes[starts + window - 1]]
    return starts, activity[starts]


def _cut_windows(series: Floats, starts: Integers, window: int) -> Floats:
    """Cuts windows out of a series: (windows, channels, time)."""
    if not len(starts):
        return np.zeros((0, series.shape[1], window), np.float32)
    return np.lib.stride_tricks.sliding_window_view(series, window, axis=0)[starts]
