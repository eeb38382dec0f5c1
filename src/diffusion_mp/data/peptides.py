"""Peptides-func from the SMILES strings it was made of."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch_geometric.data import Data

from diffusion_mp.data.cached import CachedDataset, Transform
from diffusion_mp.errors import check_choice, check_counts

_MOLECULES = "raw/peptide_multi_class_dataset.csv.gz"
_SPLIT = "splits_random_stratified_peptide.npz"
_CLASSES = 10


class PeptidesFunctional(CachedDataset):
    """Peptides-func (Dwivedi et al. 2022): 15 535 peptides, ten functions that exclude each other nowhere.

    Reads the SMILES strings and the official split in `source` and makes graphs of them with PyG's `from_smiles`, once:
    15 535 molecules take a few minutes. Nodes are heavy atoms, edges bonds. PyG numbers the same nine atom and three
    bond features as LRGB's files, which OGB made, do, but each from a list of its own: models trained on one do not
    read the other. `load_lrgb(root, "Peptides-func")` reads LRGB's.

    Nothing is unpickled. Shapes: x [N, 9] and edge_attr [E, 3] integers, edge_index [2, E] both directions, y [1, 10]
    of 0 and 1, float.
    Errors: ValueError for an unknown split, more graphs than the split has, or a row that is no molecule or has not ten
    labels; FileNotFoundError naming the missing files; ModuleNotFoundError without rdkit.

    Args:
        source: the folder with `raw/peptide_multi_class_dataset.csv.gz` (columns smiles and labels) and
            `splits_random_stratified_peptide.npz` (row numbers by split); it may be read-only.
        root: a writable folder; graphs are kept in `root/processed/<parameters>`.
        split: "train", "val" or "test".
        num_graphs: only the first so many of the split.
        transform, pre_transform, force_reload, log: as in PyG's `InMemoryDataset`.
    """

    def __init__(
        self,
        source: str | Path,
        root: str | Path,
        split: Literal["train", "val", "test"] = "train",
        *,
        num_graphs: int | None = None,
        transform: Transform | None = None,
        pre_transform: Transform | None = None,
        force_reload: bool = False,
        log: bool = True,
    ) -> None:
        check_choice(split, "split", ("train", "val", "test"))
        self.source, self.split = Path(source).expanduser(), split
        missing = [file for file in (_MOLECULES, _SPLIT) if not (self.source / file).is_file()]
        if missing:
            raise FileNotFoundError(
                f"Peptides-func is not at {self.source}: missing {', '.join(missing)}. Put the files of the Long Range "
                "Graph Benchmark (https://github.com/vijaydwivedi75/lrgb) there, under these names."
            )
        with np.load(self.source / _SPLIT, allow_pickle=False) as rows:
            self._rows: list[int] = rows[split].tolist()
        if num_graphs is not None:
            check_counts(num_graphs=num_graphs)
            if num_graphs > len(self._rows):
                raise ValueError(
                    f"num_graphs must be at most {len(self._rows)}, the size of {split}; got {num_graphs}."
                )
            self._rows = self._rows[:num_graphs]
        super().__init__(
            root,
            f"peptides-func-{split}-{len(self._rows)}",
            len(self._rows),
            transform=transform,
            pre_transform=pre_transform,
            force_reload=force_reload,
            log=log,
        )

    def make(self) -> Iterator[Data]:
        """The molecules of this split, in the order of the split file."""
        if find_spec("rdkit") is None:
            raise ModuleNotFoundError(
                "Molecules are read with rdkit, which is not installed: pip install 'diffusion-mp[molecules]'."
            )
        from torch_geometric.utils import from_smiles

        with gzip.open(self.source / _MOLECULES, "rt", newline="") as file:
            molecules = list(csv.DictReader(file))
        for row in self._rows:
            data, labels = from_smiles(molecules[row]["smiles"]), json.loads(molecules[row]["labels"])
            if data.num_nodes == 0:  # what PyG makes of a string that rdkit cannot read
                raise ValueError(f"Row {row} of {_MOLECULES} is no molecule: {molecules[row]['smiles']!r}.")
            if len(labels) != _CLASSES:
                raise ValueError(f"Row {row} of {_MOLECULES} has {len(labels)} labels; expected {_CLASSES}.")
            data.y = torch.tensor([labels], dtype=torch.float)
            yield data
