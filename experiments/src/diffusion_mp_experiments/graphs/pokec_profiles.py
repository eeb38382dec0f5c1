"""SNAP's table of Pokec's users as features and labels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from diffusion_mp_experiments.files.mapped import ArrayFolder
from diffusion_mp_experiments.files.text_tables import count_lines, line_blocks

_COLUMNS = 59
_TEXTS = range(8, _COLUMNS)  # lists of words and free text
_MISSING = (b"null", b"")
_REGIONS = 5
_BLOCK = 1 << 13  # users; a line has about 1 000 bytes
_FIELD = 64  # bytes of a number, a date or a gender
_LARGEST = 1_000_000  # of public, completion percentage and age
_DAY = re.compile(rb"\d{4}-\d\d-\d\d")

FEATURES = (
    *("public", "completion", "last_login", "registration", "age"),
    *("completion_unknown", "dates_unknown", "age_unknown"),
    *(f"region_{place}" for place in range(1, _REGIONS + 1)),
    "region_unknown",
    *(f"column_{column + 1}_filled" for column in _TEXTS),
)
_FIRST_TEXT = len(FEATURES) - len(_TEXTS)

Fields = Sequence[bytes]


def read_profiles(path: Path, arrays: ArrayFolder, *, progress: bool = True) -> None:
    """Writes x [N, 65], y [N] and user_id [N], a row for each line of the file; see `load_pokec`.

    Raises:
        ValueError: a line has not 59 columns, naming it; a column has a value of another kind, naming the lines among
            which; two lines have one user id, or there are no lines.
    """
    num_users = count_lines(path, progress=progress)
    if not num_users:
        raise ValueError(f"{path} must have a line for every user; it is empty.")
    user, label = np.zeros(num_users, np.int64), np.zeros(num_users, np.int64)
    numbers, region = np.zeros((num_users, 5)), np.zeros(num_users, np.int64)
    codes: dict[bytes, int] = {}  # of regions, in the order of their first user
    arrays.create("x", (num_users, len(FEATURES)), np.float32)
    for start, lines in line_blocks(path, _BLOCK, progress=progress):
        rows = list(_rows(path, start, lines))
        here = slice(start, start + len(rows))
        columns = list(zip(*rows, strict=True))
        try:
            _check_lengths(columns)
            user[here], label[here] = np.array(columns[0]).astype(np.int64), _genders(columns[3])
            numbers[here, 0], numbers[here, 1] = _numbers(columns[1]), _numbers(columns[2])
            numbers[here, 2], numbers[here, 3] = _days(columns[5]), _days(columns[6])
            numbers[here, 4] = _numbers(columns[7])
        except ValueError as error:
            raise ValueError(
                f"{path}, lines {here.start + 1} to {here.stop}: columns 1, 2, 3 and 8 must be numbers, 4 must be 0 "
                f"or 1, 6 and 7 dates such as 2012-05-25 11:20:00.0; null in all but the first; {error}."
            ) from error
        region[here] = [-1 if name in _MISSING else codes.setdefault(_large(name), len(codes)) for name in columns[4]]
        filled = np.array([[field not in _MISSING for field in row[_TEXTS.start :]] for row in rows], np.float32)
        arrays.write("x", (here, slice(_FIRST_TEXT, None)), filled)
    _check_users(path, user)
    numbers[numbers[:, 4] == 0, 4] = np.nan  # an age of 0 says that it was not stated
    for place, features in _features(numbers, region):
        arrays.write("x", (place, slice(_FIRST_TEXT)), features)
    arrays.put("y", label)
    arrays.put("user_id", user)


def _rows(path: Path, start: int, lines: list[bytes]) -> Iterator[Fields]:
    for number, line in enumerate(lines, start + 1):
        fields = line.split(b"\t", _COLUMNS + 1)
        if len(fields) == _COLUMNS + 1 and not fields[-1]:  # a tab ends the line
            fields.pop()
        if len(fields) != _COLUMNS:
            raise ValueError(
                f"{path}, line {number}: expected {_COLUMNS} columns between tabs, as SNAP's profiles have; got "
                f"{len(fields)}."
            )
        yield fields


def _check_lengths(columns: Sequence[Fields]) -> None:
    """Numpy makes every row as long as the longest."""
    for place in (0, 1, 2, 3, 5, 6, 7):
        longest = max(columns[place], key=len)
        if len(longest) > _FIELD:
            raise ValueError(f"{longest[:_FIELD]!r} … of column {place + 1} has {len(longest)} bytes")


def _numbers(column: Fields) -> Float[np.ndarray, " rows"]:
    stated = np.array([field not in _MISSING for field in column])
    numbers = np.array([field if known else b"0" for field, known in zip(column, stated, strict=True)]).astype(float)
    wrong = ~((numbers >= 0) & (numbers <= _LARGEST))
    if wrong.any():
        raise ValueError(f"{column[int(wrong.argmax())]!r} does not lie in 0 .. {_LARGEST}")
    return np.where(stated, numbers, np.nan)


def _days(column: Fields) -> Float[np.ndarray, " rows"]:
    """Days since 1970; the time of day is left out."""
    stated = np.array([field not in _MISSING for field in column])
    dates = [field[:10] if known else b"1970-01-01" for field, known in zip(column, stated, strict=True)]
    for date in dates:
        if not _DAY.fullmatch(date):  # numpy would take "today" for one
            raise ValueError(f"{date!r} is no date")
    text = np.array([date.decode("ascii") for date in dates])  # numpy 1 ends the process at bytes that are no date
    return np.where(stated, text.astype("datetime64[D]").astype(np.float64), np.nan)


def _genders(column: Fields) -> Int[np.ndarray, " rows"]:
    unknown = set(column) - {b"0", b"1", *_MISSING}
    if unknown:
        raise ValueError(f"gender {unknown.pop()!r} is neither 0, 1 nor null")
    return np.array([-1 if field in _MISSING else int(field) for field in column])


def _large(region: bytes) -> bytes:
    """The region without the district, "zilinsky kraj" of "zilinsky kraj, zilina"."""
    return region.partition(b",")[0].strip().lower()


def _check_users(path: Path, user: Int[np.ndarray, " N"]) -> None:
    if len(np.unique(user)) != len(user):
        raise ValueError(f"{path}: the first column must name every user once; {len(user)} lines name fewer users.")


def _features(
    numbers: Float[np.ndarray, "N five"], region: Int[np.ndarray, " N"]
) -> Iterator[tuple[slice, Float[np.ndarray, "rows columns"]]]:
    """The columns before the texts: numbers standardised over the users who state them, regions by their frequency."""
    mean, deviation = np.array([_moments(column[~np.isnan(column)]) for column in numbers.T]).T
    frequent = np.argsort(-np.bincount(region[region >= 0], minlength=_REGIONS), kind="stable")[:_REGIONS]
    for start in range(0, len(region), _BLOCK):
        rows = slice(start, start + _BLOCK)
        unknown = np.isnan(numbers[rows])
        standard = np.where(unknown, 0, (numbers[rows] - mean) / deviation)
        groups = np.stack([unknown[:, :2].any(1), unknown[:, 2:4].any(1), unknown[:, 4]], 1)
        here = region[rows, None]
        yield rows, np.concatenate([standard, groups, here == frequent, here < 0], 1).astype(np.float32)


def _moments(stated: Float[np.ndarray, " users"]) -> tuple[float, float]:
    """Mean and standard deviation; a number that is the same for all, or that nobody states, is divided by 1."""
    return (float(stated.mean()), float(stated.std()) or 1.0) if len(stated) else (0.0, 1.0)
