"""The social network Pokec, from the files of SNAP or of LINKX."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from torch_geometric.data import Data

from diffusion_mp.errors import check_choice
from diffusion_mp_experiments.files.mapped import ArrayFolder
from diffusion_mp_experiments.files.mat5 import map_variable
from diffusion_mp_experiments.files.reading import as_path, check_present, reading
from diffusion_mp_experiments.files.text_tables import count_lines, number_blocks
from diffusion_mp_experiments.graphs.agreement import check_indices
from diffusion_mp_experiments.graphs.mapped_graph import mapped_graph
from diffusion_mp_experiments.graphs.pokec_profiles import read_profiles

_FILES = {"snap": ["soc-pokec-profiles.txt", "soc-pokec-relationships.txt"], "linkx": ["pokec.mat"]}
_HOW_TO_GET = {
    "snap": "Download soc-pokec-profiles.txt.gz and soc-pokec-relationships.txt.gz from "
    "https://snap.stanford.edu/data/soc-Pokec.html (they need not be unpacked)",
    "linkx": "Download pokec.mat as the README of https://github.com/CUAI/Non-Homophily-Large-Scale says",
}
_VERSION = "1"  # of what is computed from the files
_BLOCK = 1 << 18  # rows of a matrix


def load_pokec(
    root: str | Path,
    source: Literal["snap", "linkx"] = "snap",
    *,
    cache: str | Path | None = None,
    progress: bool = True,
) -> Data:
    r"""Pokec (Takac & Zabovsky 2012): 1 632 803 users, 30 622 564 directed friendships, labels are genders.

    - `"snap"` reads `root/soc-pokec-profiles.txt` and `root/soc-pokec-relationships.txt`, each plain or as `.txt.gz`,
      block by block: less than 1 GB of memory at any size. Friendships find their users by id; a line number is none.
    - `"linkx"` reads `root/pokec.mat` of Lim et al. (2021), with *their* 65 features, whose recipe is not published.

    Files are read once, as data: nothing in them is run.

    The 65 features of the SNAP files:

    - public, completion percentage, last login, registration and age, each standardised over the users who state it, 0
      for the others, and a flag where the first two, the dates, or the age (0 is none) are not stated;
    - a flag for each of the five most frequent regions (what stands before the comma), and one for no region;
    - for each of the 51 columns 9 to 59, whether it is filled.

    The data has no masks. Wu, Wipf & Yan (2025) write of random splits of 10, 10 and 80 %, while the command that they
    released draws 50, 25 and 25 % (D13 in docs/errata.md): say which one a number was obtained with.
    `random_split(data.y, 0.1, 0.1, generator)` draws the former, `random_split(data.y, 0.5, 0.25, generator)` the
    latter, among the labelled users.

    Args:
        root: the folder of the files.
        source: "snap" or "linkx".
        cache: the folder of the arrays, by default `root/processed/pokec-<source>`. They are complete or not at all,
            lie beside the SHA-256 sums of the files (SNAP and LINKX publish none), and are opened by memory map.
        progress: show a bar while files are read, on a terminal.

    Returns:
        The graph with x [N, 65] float32, edge_index [2, E] source → target, y [N] 0 or 1, −1 where no gender is stated;
        of SNAP also user_id [N].

    Raises:
        ValueError: an unknown source, lines that are not in SNAP's format (naming them), and a friendship of somebody
            without a profile.
        FileNotFoundError: files are missing; the sentence says which and where to get them.

    Examples:
        >>> rest = "\t".join(["kraj a, x", "2012-05-25 11:20:00.0", "2005-04-03 00:00:00.0", "20"] + ["null"] * 51)
        >>> _ = (folder / "soc-pokec-profiles.txt").write_text(f"7\t1\t50\t1\t{rest}\n3\t1\t90\t0\t{rest}\n")
        >>> _ = (folder / "soc-pokec-relationships.txt").write_text("7\t3\n")
        >>> data = load_pokec(folder)
        >>> data.user_id.tolist(), data.y.tolist(), data.edge_index.tolist()
        ([7, 3], [1, 0], [[0], [1]])
    """
    check_choice(source, "source", _FILES)
    root = as_path(root, "root")
    folder = as_path(cache, "cache") if cache else root / "processed" / f"pokec-{source}"
    files = [root / name for name in _FILES[source]]
    if source == "snap":
        files = [file if file.is_file() else file.with_name(f"{file.name}.gz") for file in files]

    def make(arrays: ArrayFolder) -> None:
        instead = "Without them, synthetic_pokec() generates a graph of the same size."
        check_present("Pokec", root, files, f"{_HOW_TO_GET[source]} and put them there. {instead}")
        if source == "snap":
            profiles, friendships = files
            read_profiles(profiles, arrays, progress=progress)
            _read_friendships(friendships, arrays, progress=progress)
        else:
            _read_mat(files[0], arrays)

    return mapped_graph(folder, make, files, made_by=f"pokec {source} {_VERSION}", classes=2)


def _read_friendships(path: Path, arrays: ArrayFolder, *, progress: bool) -> None:
    """Writes edge_index [2, E], in the order of the file."""
    user = np.load(arrays.path / "user_id.npy")
    order = np.argsort(user)
    ids = user[order]
    num_edges = count_lines(path, progress=progress)
    arrays.create("edge_index", (2, num_edges), np.int64)
    for start, pairs in number_blocks(path, 2, np.int64, progress=progress):
        place = np.searchsorted(ids, pairs).clip(max=len(ids) - 1)
        stranger = pairs[ids[place] != pairs]
        if len(stranger):
            raise ValueError(
                f"{path}, from line {start + 1} on: user {stranger[0]} has no line in the profiles, nor have "
                f"{len(stranger) - 1} other ends among these {len(pairs)} lines. Take both files from one release."
            )
        arrays.write("edge_index", (slice(None), slice(start, start + len(pairs))), order[place].T)


def _read_mat(path: Path, arrays: ArrayFolder) -> None:
    """Writes x, edge_index and y, block by block."""
    way_out = "It must be LINKX's pokec.mat, with node_feat [N, C], edge_index [2, E] and label [1, N]; fetch it anew."
    with reading(path, way_out), TemporaryDirectory(dir=arrays.path) as scratch:
        x, edges, label = (map_variable(path, name, Path(scratch)) for name in ("node_feat", "edge_index", "label"))
        if len(edges) != 2 or label.size != len(x):
            raise ValueError(f"edge_index is {edges.shape}, and {label.size} labels go with {len(x)} rows of node_feat")
        arrays.put("y", _integers(label.reshape(-1), "label"))
        arrays.create("x", x.shape, np.float32)
        for start in range(0, len(x), _BLOCK):
            arrays.write("x", slice(start, start + _BLOCK), x[start : start + _BLOCK].astype(np.float32))
        arrays.create("edge_index", edges.shape, np.int64)
        for start in range(0, edges.shape[1], _BLOCK):
            where = slice(None), slice(start, start + _BLOCK)
            pairs = _integers(edges[where], "edge_index")
            check_indices(torch.from_numpy(pairs), len(x), "edge_index")
            arrays.write("edge_index", where, pairs)


def _integers(numbers: Shaped[np.ndarray, " ..."], name: str) -> Int64[np.ndarray, " ..."]:
    with np.errstate(invalid="ignore"):
        integers = numbers.astype(np.int64)
    if not np.array_equal(integers, numbers):
        raise ValueError(f"{name} must hold integers")
    return integers
