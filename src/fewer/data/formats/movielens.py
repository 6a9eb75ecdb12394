"""MovieLens 100k: the film that a user watches next."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fewer.data.formats.readers import Members, find_inside, reader
from fewer.data.raw_dataset import RawDataset
from fewer.data.recommendation import build_user_tasks
from fewer.errors import DataError, unknown_name
from fewer.registry import FORMATS

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

_GENRES, _OCCUPATIONS, _DAYS = (
    words.split()
    for words in (
        "unknown action adventure animation children comedy crime documentary drama fantasy film-noir horror musical "
        "mystery romance sci-fi thriller war western",
        "administrator artist doctor educator engineer entertainment executive healthcare homemaker lawyer librarian "
        "marketing none other programmer retired salesman scientist student technician writer",
        "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    )
)
_RATINGS = range(1, 6)
_DAY, _HOUR = 86400, 3600

FEATURES = (
    *(f"last film: {genre}" for genre in _GENRES),
    "last film: year of release (decades after 1950)",
    *(f"last film: rated {rating}" for rating in _RATINGS),
    *(f"films so far: share of {genre}" for genre in _GENRES),
    "films so far: mean rating / 5",
    "films so far: log(1 + number) / 5",
    "user: age / 50",
    "user: female",
    "user: male",
    *(f"user: {occupation}" for occupation in _OCCUPATIONS),
    *(f"time: hour {hour}" for hour in range(24)),
    *(f"time: {day}" for day in _DAYS),
    "time: log(1 + seconds since the last film) / 10",
    "time: log(1 + seconds since the first film) / 10",
)
"""The 103 features. All are known before the user chooses: none describes the film to predict."""


@FORMATS.register("movielens")
@reader("MovieLens 100k (u.data, u.item, u.user)")
def read_movielens(
    path: Path,
    items: str = "films",
    own_classes: bool = False,
    max_items: int = 0,
    min_records: int = 0,
    last_item: bool = False,
) -> RawDataset:
    """Films in the order in which each user rated them; a client is a user, a class is a film.

    The features are `FEATURES`. They follow the recommendation task of Chen et al. (2018), where 103 features
    describe the last item, the user and the time, as far as these files provide them.

    A user rates a film only once, so a user's earlier films do not predict the next one. With `items = genres`, a class
    is a film's set of genres (drama, comedy + romance …), which recurs. `build_user_tasks` explains `own_classes`,
    `max_items`, `min_records` and `last_item`.
    """
    if items not in ("films", "genres"):
        raise unknown_name("items of movielens", items, ("films", "genres"))
    path = find_inside(path, "ml-100k.zip", "ml-100k")
    files = Members(path, lambda name: name.rpartition("/")[2] in ("u.data", "u.item", "u.user"))
    layouts = ("u.data", "\t", 4), ("u.item", "|", 5 + len(_GENRES)), ("u.user", "|", 5)
    ratings, films, people = (_parse_table(files, *layout) for layout in layouts)
    (genres, years, titles), users = _parse_films(films), _parse_users(people)
    user, film, rating, time = _parse_ratings(ratings, len(users), len(titles), path)
    history = _compute_history(user, film, rating, time, genres, years)
    x = np.concatenate([history[:, :-2], users[user], _encode_time(time), history[:, -2:]], axis=1)
    if items == "films":
        y, class_names = film, titles
    else:
        genre_sets, film_sets = np.unique(genres, axis=0, return_inverse=True)
        y = film_sets.reshape(-1)[film]
        class_names = tuple(" + ".join(np.array(_GENRES)[flags > 0]) for flags in genre_sets)
    raw = RawDataset(x, y, client_ids=user + 1, class_names=class_names, time_ordered=True)
    return build_user_tasks(raw, own_classes, max_items, min_records, last_item)


def _parse_table(files: Members, name: str, separator: str, columns: int) -> list[list[str]]:
    rows = [line.split(separator) for line in files[name].decode("latin-1").splitlines() if line.strip()]
    for number, row in enumerate(rows, 1):
        if len(row) != columns:
            raise DataError(f"{files.path}: {name}, line {number} has {len(row)} columns, expected {columns}")
    return rows


def _parse_films(rows: list[list[str]]) -> tuple[Floats, Floats, tuple[str, ...]]:
    """Returns genres, decades after 1950 (0 if the year is unknown) and titles."""
    if [row[0] for row in rows] != [str(number) for number in range(1, len(rows) + 1)]:
        raise DataError("film ids in u.item must be 1, 2, 3, …")
    years = [(int(row[2][-4:]) - 1950) / 10 if row[2] else 0.0 for row in rows]
    genres = np.array([row[5:] for row in rows]).astype(np.float32)
    return genres, np.array(years, np.float32), tuple(row[1] for row in rows)


def _parse_users(rows: list[list[str]]) -> Floats:
    """Returns features of age, sex and occupation."""
    if [row[0] for row in rows] != [str(number) for number in range(1, len(rows) + 1)]:
        raise DataError("user ids in u.user must be 1, 2, 3, …")
    users = np.zeros((len(rows), 3 + len(_OCCUPATIONS)), np.float32)
    for user, (_, age, sex, occupation, _) in zip(users, rows, strict=True):
        user[0] = int(age) / 50
        user[1 if sex == "F" else 2] = 1
        user[3 + _OCCUPATIONS.index(occupation if occupation in _OCCUPATIONS else "other")] = 1
    return users


def _parse_ratings(rows: list[list[str]], users: int, films: int, path: Path) -> tuple[Integers, ...]:
    """Returns users and films (numbered from 0), ratings and times, sorted by user and time."""
    if rows and not rows[0][0].isdecimal():  # some copies have a header
        rows = rows[1:]
    if not rows:
        raise DataError(f"{path}: u.data has no ratings")
    user, film, rating, time = np.array(rows).astype(np.int64).T
    for field, values, last in (("user", user, users), ("film", film, films), ("rating", rating, _RATINGS[-1])):
        if values.min() < 1 or values.max() > last:
            raise DataError(f"{path}: u.data has {field} {values.min()} or {values.max()} (allowed: 1 to {last})")
    order = np.lexsort((time, user))
    return user[order] - 1, film[order] - 1, rating[order], time[order]


def _compute_history(
    user: Integers, film: Integers, rating: Integers, time: Integers, genres: Floats, years: Floats
) -> Floats:
    """Computes features of a user's films before each one. The last two are times since the last and first film."""
    rows = np.arange(len(user))
    first = np.searchsorted(user, user)
    before = (rows - first)[:, None]
    known = (before > 0).astype(np.float32)
    last = np.maximum(rows - 1, 0)
    last_rating = np.eye(len(_RATINGS))[rating[last] - 1]
    totals = np.cumsum(np.column_stack([genres[film], rating]), axis=0, dtype=np.float64)
    means = (totals[last] - totals[first] + np.column_stack([genres[film], rating])[first]) / np.maximum(before, 1)
    means[:, -1] /= _RATINGS[-1]
    elapsed = np.log1p(np.column_stack([time - time[last], time - time[first]]).clip(0)) / 10
    history = np.column_stack([genres[film[last]], years[film[last]], last_rating, means])
    return np.column_stack([known * history, np.log1p(before) / 5, known * elapsed]).astype(np.float32)


def _encode_time(time: Integers) -> Floats:
    """One-hot hour and day of the week, in UTC."""
    hours, days = time % _DAY // _HOUR, (time // _DAY + 3) % 7  # January 1, 1970 was a Thursday
    return np.column_stack([np.eye(24)[hours], np.eye(7)[days]]).astype(np.float32)
