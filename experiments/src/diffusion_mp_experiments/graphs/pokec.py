"""The social network Pokec, from the files of SNAP or of LINKX."""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch_geometric.data import Data

from diffusion_mp.checks import check_choice, check_finite
from diffusion_mp_experiments.files.arrays import read_matrices
from diffusion_mp_experiments.files.reading import (
    as_path,
    check_indices,
    check_present,
    reading,
)
from diffusion_mp_experiments.files.text_tables import (
    count_lines,
    line_blocks,
    number_blocks,
)
from diffusion_mp_experiments.graphs.cached import ArrayFolder, mapped_graph

Source = Literal["auto", "snap", "linkx"]
_FILES = {
    "snap": ["soc-pokec-profiles.txt", "soc-pokec-relationships.txt"],
    "linkx": ["pokec.mat"],
}
_HOW_TO_GET = {
    "snap": "Download soc-pokec-profiles.txt.gz and soc-pokec-relationships.txt.gz from "
    "https://snap.stanford.edu/data/soc-Pokec.html and put them there; they need not be unpacked. Files of any name "
    "with lines like theirs are read too, and a CSV file of users that begins "
    "user_id,gender,region_large,region_small,age.",
    "linkx": "Download pokec.mat as the README of https://github.com/CUAI/Non-Homophily-Large-Scale says, and put it "
    "there.",
}
_VERSION = "1"  # of what is computed from the files
_ROWS = 1 << 18  # of a matrix, in memory at a time
_MEMORY = (
    4 << 30
)  # bytes to read a matrix of LINKX in, the largest of which has 0.85 GB
_COLUMNS = 59  # of the profiles
_TEXTS = range(8, _COLUMNS)  # lists of words and free text
_MISSING = (b"null", b"")
_REGIONS = 5
_USERS = 1 << 13  # in memory at a time
_PROFILE = 1 << 18  # bytes of a line, which has about 1 000
_LARGEST = 1_000_000  # of public, completion percentage and age
_DAY = re.compile(rb"\d{4}-\d\d-\d\d")
_HEADER = b"user_id,gender,region_large,region_small,age"  # of users in a CSV file
_PAIR = re.compile(rb"\d+\s+\d+\s*")

FEATURES = (
    *("public", "completion", "last_login", "registration", "age"),
    *("completion_unknown", "dates_unknown", "age_unknown"),
    *(f"region_{rank}" for rank in range(1, _REGIONS + 1)),
    "region_unknown",
    *(f"column_{column + 1}_filled" for column in _TEXTS),
)
_FIRST_TEXT = len(FEATURES) - len(_TEXTS)


def load_pokec(
    root: str | Path,
    source: Source = "auto",
    *,
    cache: str | Path | None = None,
) -> Data:
    """Load Pokec (Takac & Zabovsky 2012): 1 632 803 users, 30 622 564 directed friendships, labels are genders.

    The 65 features of the SNAP files are:

    - public, completion percentage, last login, registration and age, each standardised over the users who state it,
      and 0 for the others;
    - flags for users who do not state one of the first two, one of the dates, or the age (0 is none);
    - a flag for each of the five most frequent regions (the part before the comma), and for no region;
    - for each of the 51 columns 9 to 59, whether it is filled.

    There are no masks. Wu, Wipf & Yan (2025) write of random splits of 10, 10 and 80 %, while their released command
    draws 50, 25 and 25 % (D13 in docs/errata.md): say which split a number was obtained with.

    Args:
        root: the folder that holds the files.
        source: `"snap"` reads `root/soc-pokec-profiles.txt` and `root/soc-pokec-relationships.txt`, each plain or as
            `.txt.gz`, block by block: less than 1 GB of memory at any size. Friendships find their users by id, not by
            line number. Without these two files, it takes the longest files of `root` whose first lines look alike,
            such as those of a sample. The users of a sample may be a CSV file with the columns user_id, gender,
            region_large, region_small and age, where nobody states the other columns of a profile. `"linkx"` reads
            `root/pokec.mat` of Lim et al. (2021), with *their* 65 features, whose recipe is not published. `"auto"`,
            the default, is `"linkx"` if `root` has that file and no file of SNAP.
        cache: the folder from which the arrays are memory-mapped; it records SHA-256 sums. By default
            `root/processed/pokec-<source>`.

    Shapes:
        x: [N, 65] float32.
        edge_index: [2, E], source → target.
        y: [N] of 0, 1 or −1 (unstated).
        user_id: [N], from SNAP only.

    Raises:
        FileNotFoundError: a file is missing. The message says where to get it.
        ValueError: a file is damaged.

    Examples:
        >>> load_pokec(folder)  # says what to put where
        Traceback (most recent call last):
        FileNotFoundError: Pokec...soc-pokec-profiles.txt.gz...https://snap.stanford.edu/data/soc-Pokec.html...
    """
    check_choice(source, "source", ["auto", *_FILES])
    root = as_path(root, "root")
    files = _snap_files(root)
    of_linkx = [root / name for name in _FILES["linkx"]]
    if source == "auto":
        alone = of_linkx[0].is_file() and not files[0].is_file()
        source = "linkx" if alone else "snap"
    if source == "linkx":
        files = of_linkx
    folder = (
        as_path(cache, "cache") if cache else root / "processed" / f"pokec-{source}"
    )

    def make(arrays: ArrayFolder) -> None:
        instead = "Without them, synthetic_pokec() generates a graph of the same size."
        check_present("Pokec", root, files, f"{_HOW_TO_GET[source]} {instead}")
        if source == "snap":
            _read_profiles(files[0], arrays)
            _read_friendships(files[1], arrays)
        else:
            _read_mat(files[0], arrays)

    return mapped_graph(
        folder, make, files, made_by=f"pokec {source} {_VERSION}", classes=2
    )


def _snap_files(root: Path) -> list[Path]:
    """Return the files of profiles and friendships: of the names that SNAP gave them, or else found by content."""
    named = [root / name for name in _FILES["snap"]]
    named = [
        file if file.is_file() else file.with_name(f"{file.name}.gz") for file in named
    ]
    if any(file.is_file() for file in named) or not root.is_dir():
        return named
    users = []
    pairs = []
    for file in sorted(root.iterdir()):
        line = _first_line(file) if file.is_file() else b""
        if line == _HEADER or line.count(b"\t") >= _COLUMNS - 1:
            users.append(file)
        elif _PAIR.fullmatch(line):
            pairs.append(file)
    if not users or not pairs:
        return named
    # Several samples may lie side by side.
    longest = partial(count_lines, longest=_PROFILE)
    return [max(users, key=longest), max(pairs, key=longest)]


def _first_line(path: Path) -> bytes:
    """Return the first line of a text file, which is empty if the file is something else."""
    try:
        _, lines = next(line_blocks(path, _PROFILE), (0, [b""]))
    except ValueError:
        return b""
    return lines[0]


def _read_friendships(path: Path, arrays: ArrayFolder) -> None:
    user = np.load(arrays.path / "user_id.npy")
    # Ids have gaps and come in any order, so they are looked up among the sorted ones.
    order = np.argsort(user)
    ids = user[order]
    # An array on the disk needs its size before its first block.
    arrays.create("edge_index", (2, count_lines(path)), np.int64)
    for start, pairs in number_blocks(path, 2, np.int64):
        position = np.searchsorted(ids, pairs).clip(max=len(ids) - 1)
        stranger = pairs[ids[position] != pairs]
        if len(stranger):
            raise ValueError(
                f"{path}, from line {start + 1} on: user {stranger[0]} has no line in the profiles, nor have "
                f"{len(stranger) - 1} other ends among these {len(pairs)} lines. Take both files from one release."
            )
        arrays.write(
            "edge_index",
            (slice(None), slice(start, start + len(pairs))),
            order[position].T,
        )


def _read_mat(path: Path, arrays: ArrayFolder) -> None:
    way_out = "It must be LINKX's pokec.mat, with node_feat [N, C], edge_index [2, E] and label [1, N]; fetch it anew."
    with reading(path, way_out), TemporaryDirectory(dir=arrays.path) as scratch:
        x, edges, label = read_matrices(
            path, ["node_feat", "edge_index", "label"], Path(scratch), _MEMORY
        )
        if len(edges) != 2 or label.size != len(x):
            raise ValueError(
                f"edge_index is {edges.shape}, and {label.size} labels go with {len(x)} rows of node_feat"
            )
        arrays.put("y", _integers(label.reshape(-1), "label"))
        arrays.create("x", x.shape, np.float32)
        for start in range(0, len(x), _ROWS):
            rows = x[start : start + _ROWS].astype(np.float32)
            check_finite(torch.from_numpy(rows), "node_feat")
            arrays.write("x", slice(start, start + _ROWS), rows)
        arrays.create("edge_index", edges.shape, np.int64)
        for start in range(0, edges.shape[1], _ROWS):
            where = slice(None), slice(start, start + _ROWS)
            pairs = _integers(edges[where], "edge_index")
            check_indices(torch.from_numpy(pairs), len(x), "edge_index")
            arrays.write("edge_index", where, pairs)


def _integers(numbers: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        integers = numbers.astype(np.int64)
    if not np.array_equal(integers, numbers):
        raise ValueError(f"{name} must hold integers")
    return integers


def _read_profiles(path: Path, arrays: ArrayFolder) -> None:
    num_users = count_lines(path, _PROFILE) - (_first_line(path) == _HEADER)
    if not num_users:
        raise ValueError(f"{path} must have a line for every user; it is empty.")
    user = np.zeros(num_users, np.int64)
    label = np.zeros(num_users, np.int64)
    numbers = np.zeros((num_users, 5))
    region = np.zeros(num_users, np.int64)
    codes: dict[bytes, int] = {}  # of regions, in the order of their first user
    arrays.create("x", (num_users, len(FEATURES)), np.float32)
    for start, rows in _profiles(path):
        here = slice(start, start + len(rows))
        columns = list(zip(*rows, strict=True))
        try:
            user[here] = np.array(columns[0]).astype(np.int64)
            label[here] = _genders(columns[3])
            numbers[here] = np.stack(
                [
                    *map(_numbers, columns[1:3]),
                    *map(_days, columns[5:7]),
                    _numbers(columns[7]),
                ],
                1,
            )
        except ValueError as error:
            raise ValueError(
                f"{path}, users {here.start + 1} to {here.stop}: ids, public, completion percentage and age must be "
                f"numbers, genders 0 or 1, dates such as 2012-05-25 11:20:00.0; all but ids may be null; {error}."
            ) from error
        # The region without the district: "zilinsky kraj" of "zilinsky kraj, zilina".
        # Districts are too many for a column each.
        region[here] = [
            -1
            if name in _MISSING
            else codes.setdefault(name.partition(b",")[0].strip().lower(), len(codes))
            for name in columns[4]
        ]
        filled = np.array(
            [[field not in _MISSING for field in row[_TEXTS.start :]] for row in rows],
            np.float32,
        )
        arrays.write("x", (here, slice(_FIRST_TEXT, None)), filled)
    if len(np.unique(user)) != num_users:
        raise ValueError(
            f"{path}: the first column must name every user once; {num_users} lines name fewer users."
        )
    numbers[numbers[:, 4] == 0, 4] = np.nan  # an age of 0 says that it was not stated
    for position, features in _features(numbers, region):
        arrays.write("x", (position, slice(_FIRST_TEXT)), features)
    arrays.put("y", label)
    arrays.put("user_id", user)


def _profiles(path: Path) -> Iterator[tuple[int, list[list[bytes]]]]:
    """Yield lists of users, 59 fields each, each with the number of its first user."""
    header = _first_line(path) == _HEADER
    for start, lines in line_blocks(path, _PROFILE):
        rows = [
            _fields(path, number, line, header)
            for number, line in enumerate(lines, start + 1)
        ]
        if start == 0:
            rows = rows[header:]
        yield max(start - header, 0), rows


def _fields(path: Path, number: int, line: bytes, few: bool) -> list[bytes]:
    """Return the fields of a profile, also of one that states no more than a line of a CSV file."""
    columns = _COLUMNS
    delimiter = b"\t"
    expected = f"expected {_COLUMNS} columns between tabs, as SNAP's profiles have"
    if few:
        columns = _HEADER.count(b",") + 1
        delimiter = b","
        expected = f"expected the columns {_HEADER.decode()}"
    fields = line.split(delimiter, columns + 1)
    if len(fields) == columns + 1 and not fields[-1]:  # a tab ends the line
        fields.pop()
    if len(fields) != columns:
        raise ValueError(f"{path}, line {number}: {expected}; got {len(fields)}.")
    if few:
        user, gender, region, _, age = fields
        unstated = [_MISSING[0]] * _COLUMNS
        fields = [user, *unstated[:2], gender, region, *unstated[:2], age]
        fields += unstated[len(fields) :]
    return fields


def _numbers(column: Sequence[bytes]) -> Float[np.ndarray, " rows"]:
    numbers = _where_stated(column, b"nan").astype(float)
    # What is written as "nan" is a text, and no number that was left out.
    wrong = _stated(column) & ~((numbers >= 0) & (numbers <= _LARGEST))
    if wrong.any():
        raise ValueError(
            f"{column[int(wrong.argmax())]!r} does not lie in 0 .. {_LARGEST}"
        )
    return numbers


def _days(column: Sequence[bytes]) -> Float[np.ndarray, " rows"]:
    """Return days since 1970, without the time of day."""
    dates = [date[:10] for date in _where_stated(column, b"1970-01-01").tolist()]
    for date in dates:
        if not _DAY.fullmatch(date):  # NumPy would take "today" for one
            raise ValueError(f"{date!r} is no date")
    # NumPy 1 ends the process at bytes that are not a date.
    days = np.array([date.decode("ascii") for date in dates])
    return np.where(
        _stated(column), days.astype("datetime64[D]").astype(np.float64), np.nan
    )


def _genders(column: Sequence[bytes]) -> Int[np.ndarray, " rows"]:
    if unknown := set(column) - {b"0", b"1", *_MISSING}:
        raise ValueError(f"gender {unknown.pop()!r} is neither 0, 1 nor null")
    return _where_stated(column, b"-1").astype(np.int64)


def _stated(column: Sequence[bytes]) -> Bool[np.ndarray, " rows"]:
    return ~np.isin(np.array(column), _MISSING)


def _where_stated(
    column: Sequence[bytes], instead: bytes
) -> Shaped[np.ndarray, " rows"]:
    return np.where(_stated(column), np.array(column), instead)


def _features(
    numbers: Float[np.ndarray, "N five"], region: Int[np.ndarray, " N"]
) -> Iterator[tuple[slice, Float[np.ndarray, "rows columns"]]]:
    """Yield the columns before the texts: standardised numbers, and regions by their frequency."""
    mean, deviation = np.array(
        [_moments(column[~np.isnan(column)]) for column in numbers.T]
    ).T
    # Among regions of one frequency the first in the file comes first.
    frequent = np.argsort(
        -np.bincount(region[region >= 0], minlength=_REGIONS), kind="stable"
    )[:_REGIONS]
    for start in range(0, len(region), _USERS):
        rows = slice(start, start + _USERS)
        unknown = np.isnan(numbers[rows])
        standard = np.where(unknown, 0, (numbers[rows] - mean) / deviation)
        groups = np.stack(
            [unknown[:, :2].any(1), unknown[:, 2:4].any(1), unknown[:, 4]], 1
        )
        here = region[rows, None]
        yield (
            rows,
            np.concatenate([standard, groups, here == frequent, here < 0], 1).astype(
                np.float32
            ),
        )


def _moments(stated: Float[np.ndarray, " users"]) -> tuple[float, float]:
    """Return mean and standard deviation; the deviation is 1 if a number is equal for all, or if nobody states it."""
    if not len(stated):
        return 0.0, 1.0
    return float(stated.mean()), float(stated.std()) or 1.0
