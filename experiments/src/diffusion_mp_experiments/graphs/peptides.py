"""Peptides-func from the SMILES strings it was made of."""

import csv
import gzip
import io
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch_geometric.data import Data
from torch_geometric.utils import from_smiles

from diffusion_mp.errors import check_choice, check_counts
from diffusion_mp_experiments.files.arrays import read_npz
from diffusion_mp_experiments.files.reading import as_path, check_present, reading
from diffusion_mp_experiments.graphs.cached import CachedDataset

_MOLECULES = "raw/peptide_multi_class_dataset.csv.gz"
_SPLIT = "splits_random_stratified_peptide.npz"
_CLASSES = 10
_LARGEST = 1 << 26  # bytes of a file, unpacked
_WAY_OUT = "Fetch it anew, from https://github.com/vijaydwivedi75/lrgb."


class PeptidesFunctional(CachedDataset):
    """Peptides-func (Dwivedi et al. 2022): 15 535 peptides with ten binary labels.

    Makes graphs of SMILES strings with PyG's `from_smiles` (extra `molecules`), once: that takes a few minutes. Nodes
    are heavy atoms, edges bonds. PyG numbers the same nine atom and three bond features as the files of the Long Range
    Graph Benchmark, but from other lists: models trained on one do not read the other. PyG's `LRGBDataset` unpickles
    those files.

    Shapes: x [N, 9] and edge_attr [E, 3] integers, edge_index [2, E] both directions, y [1, 10] of 0 and 1, float.

    Args:
        source: the folder with `raw/peptide_multi_class_dataset.csv.gz` (columns smiles and labels) and
            `splits_random_stratified_peptide.npz` (row numbers by split); it may be read-only.
        root: a writable folder; graphs are kept in `root/processed/<parameters>`.
        split: "train", "val" or "test".
        num_graphs: how many of the split, from its beginning; all by default.
        options: transform, pre_transform, force_reload and log of `CachedDataset`.

    Examples:
        >>> PeptidesFunctional(folder, folder / "cache")  # says what to put where
        Traceback (most recent call last):
        FileNotFoundError: Peptides-func...raw/peptide_multi_class_dataset.csv.gz...
    """

    def __init__(
        self,
        source: str | Path,
        root: str | Path,
        split: Literal["train", "val", "test"] = "train",
        *,
        num_graphs: int | None = None,
        **options: Any,
    ) -> None:
        check_choice(split, "split", ("train", "val", "test"))
        self.source, self.split = as_path(source, "source"), split
        table, official = self.source / _MOLECULES, self.source / _SPLIT
        benchmark = "the files of the Long Range Graph Benchmark (https://github.com/vijaydwivedi75/lrgb)"
        check_present("Peptides-func", self.source, [table, official], f"Put {benchmark} there, under these names.")
        with reading(official, _WAY_OUT):
            rows = read_npz(official, [split], _LARGEST)[split]
            if rows.dtype.kind not in "iu" or rows.ndim != 1 or (len(rows) and rows.min() < 0):
                raise ValueError(f"its {split} is an array {rows.dtype} {rows.shape}, not one of row numbers")
            self._rows = rows.tolist()
        if num_graphs is not None:
            check_counts(num_graphs=num_graphs)
            if num_graphs > len(self._rows):
                most = f"{len(self._rows)}, the size of {split}"
                raise ValueError(f"num_graphs must be at most {most}; got {num_graphs}.")
            self._rows = self._rows[:num_graphs]
        super().__init__(root, f"peptides-func-{split}-{len(self._rows)}", len(self._rows), **options)

    def make(self) -> Iterator[Data]:
        if find_spec("rdkit") is None:
            install = "pip install 'diffusion-mp-experiments[molecules]'"
            raise ModuleNotFoundError(f"Molecules are read with rdkit, which is not installed: {install}.")
        path = self.source / _MOLECULES
        with reading(path, _WAY_OUT):
            with gzip.open(path) as file:
                text = file.read(_LARGEST + 1)
            if len(text) > _LARGEST:
                raise ValueError(f"it unpacks into more than {_LARGEST} bytes, and the table has 7 million")
            molecules = list(csv.DictReader(io.StringIO(text.decode(), newline="")))
            if self._rows and max(self._rows) >= len(molecules):
                raise ValueError(f"it has {len(molecules)} rows, and {_SPLIT} asks for row {max(self._rows)}")
            for row in self._rows:
                data, labels = from_smiles(molecules[row]["smiles"]), json.loads(molecules[row]["labels"])
                if data.num_nodes == 0:  # what PyG makes of a string that rdkit cannot read
                    raise ValueError(f"Row {row} of {_MOLECULES} is no molecule: {molecules[row]['smiles']!r}.")
                if len(labels) != _CLASSES or not {0, 1}.issuperset(labels):
                    raise ValueError(f"Row {row} of {_MOLECULES} must have {_CLASSES} labels 0 or 1; got {labels}.")
                data.y = torch.tensor([labels], dtype=torch.float)
                yield data
