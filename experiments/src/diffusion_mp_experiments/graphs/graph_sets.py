"""Sets of small graphs with labels: TU Dortmund, SynMol, and Peptides-func."""

import csv
import gzip
import io
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch.nn.functional import one_hot
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.io import read_tu_data
from torch_geometric.utils import from_smiles

from diffusion_mp.checks import (
    Count,
    check_choice,
    check_finite,
    check_kind,
    checked,
    describe,
    needed_by,
)
from diffusion_mp_experiments.files.arrays import read_npz
from diffusion_mp_experiments.files.reading import (
    as_path,
    check_indices,
    check_present,
    reading,
)
from diffusion_mp_experiments.files.text_tables import count_lines, line_blocks
from diffusion_mp_experiments.graphs.cached import CachedDataset, check_collated

_TU = "from https://chrsmrrs.github.io/datasets."


def load_tu(root: str | Path, name: str) -> list[Data]:
    """Load one set of graphs of TUDataset (Morris et al. 2020), such as MUTAG or PROTEINS.

    The function reads `root/<name>/raw/<name>_*.txt` with PyG's `read_tu_data` and writes nothing there. It does not
    open PyG's own cache. Features are the attributes of nodes, which PyG's `TUDataset` leaves out by default, followed
    by the one-hot labels of nodes. A last line may end without a line break, although PyG's reader would drop its end.

    Args:
        root: the folder that holds the folder `<name>`.
        name: name of the set.

    Shapes:
        x: [N, C].
        edge_index: [2, E].
        y: [1].
        edge_attr: [E, D] if edges have attributes.

    Raises:
        FileNotFoundError: a file is missing. The message says where to get it.
        ValueError: a file is damaged.

    Examples:
        >>> load_tu(folder, "MUTAG")  # says what to put where
        Traceback (most recent call last):
        FileNotFoundError: MUTAG of TUDataset...MUTAG_A.txt...https://chrsmrrs.github.io/datasets.
    """
    check_kind(name, "name", str, "the name of a data set, like MUTAG")
    return read_tu(as_path(root, "root") / name / "raw", name)


def read_tu(raw: Path, name: str, *, constant: bool = False) -> list[Data]:
    """Return the graphs of `load_tu` from the folder `raw`; `constant` makes features of ones if nodes have none."""
    files = [
        raw / f"{name}_{part}.txt" for part in ("A", "graph_indicator", "graph_labels")
    ]
    check_present(
        f"{name} of TUDataset", raw, files, f"Unpack its archive there, {_TU}"
    )
    with reading(raw, f"Fetch it anew, {_TU}"), TemporaryDirectory() as scratch:
        # PyG reads a folder, and this one is never written to.
        _rewrite(raw, name, Path(scratch))
        has_features = any(Path(scratch).glob(f"{name}_node_*.txt"))
        if constant and not has_features:
            ones = "1\n" * count_lines(raw / f"{name}_graph_indicator.txt")
            (Path(scratch) / f"{name}_node_attributes.txt").write_text(ones)
        data, slices, _ = read_tu_data(scratch, name)
        if data.x is None:
            raise ValueError("its nodes have neither labels nor attributes")
        data.x = data.x.float()
        check_finite(data.x, "attributes")
        if data.y.dim() != 1 or data.y.is_floating_point():
            raise ValueError(
                f"labels of graphs must be whole numbers; got {describe(data.y)}"
            )
        # PyG leaves out the last graphs where they have no edges: theirs start where all others end.
        starts = {key: torch.as_tensor(slices[key]) for key in data.to_dict()}
        # PyG takes as many labels as nodes for labels of nodes.
        if not starts["y"].equal(torch.arange(len(data.y) + 1)):
            raise ValueError(
                f"its nodes are those of {len(starts['x']) - 1} graphs, but it has {len(data.y)} labels"
            )
        missing = {
            key: max(len(data.y) + 1 - len(start), 0) for key, start in starts.items()
        }
        slices = {
            key: torch.cat([start, start[-1:].expand(missing[key])])
            for key, start in starts.items()
        }
        check_collated(data.to_dict(), slices, len(data.y))
    # PyG cuts the collated tensors where `slices` says.
    graphs = InMemoryDataset()
    graphs.data = data
    graphs.slices = slices
    return list(graphs)


_PARTS = (
    *("A", "graph_indicator", "graph_labels", "graph_attributes"),
    *("node_labels", "node_attributes", "edge_labels", "edge_attributes"),
)


def _rewrite(raw: Path, name: str, scratch: Path) -> None:
    """Write the files anew for PyG's reader, which silently drops the end of a last line without a line break."""
    for part in _PARTS:
        path = raw / f"{name}_{part}.txt"
        if path.is_file():
            with (scratch / path.name).open("wb") as file:
                for _, lines in line_blocks(path):
                    file.writelines(line + b"\n" for line in lines)


_SYNMOL = "logic8_graphs_plain.npz"
_NUMBERS = (
    "atom_type",
    "node_label",
    "y",
    "num_nodes",
    "num_edges",
    "edge_index_local",
    "train_index",
    "test_index",
)
_LARGEST = 1 << 26  # bytes of a file, unpacked
_ATOMS = 64  # more types than any molecule needs
_LOGIC8 = "Make it anew of the files of https://github.com/google-research/graph-attribution (data, logic8)."


def load_synmol(root: str | Path, split: Literal["train", "test"]) -> list[Data]:
    """Load molecules labelled by whether they contain certain parts together (Sanchez-Lengeling et al. 2020, "logic8").

    The function reads `root/logic8_graphs_plain.npz`, the published graphs without their pickles: 7 753 molecules to
    train and 918 to test.

    Args:
        root: the folder that holds the file.
        split: "train" or "test".

    Shapes:
        x: [N, types], one-hot types of atoms.
        edge_index: [2, E].
        edge_attr: [E, 5].
        y: [1] in 0..1.
        node_label: [N], whether an atom is part of the reason for the label.

    Raises:
        FileNotFoundError: the file is missing. The message says where to get it.
        ValueError: the file is damaged.

    Examples:
        >>> load_synmol(folder, "train")  # says what to put where
        Traceback (most recent call last):
        FileNotFoundError: SynMol...logic8_graphs_plain.npz...
    """
    check_choice(split, "split", ("train", "test"))
    path = as_path(root, "root") / _SYNMOL
    check_present("SynMol", path.parent, [path], _LOGIC8)
    with reading(path, _LOGIC8):
        read = read_npz(path, [*_NUMBERS, "edge_feat"], _LARGEST)
        arrays = {key: torch.from_numpy(part) for key, part in read.items()}
        edge_feat = arrays.pop("edge_feat").float()
        numbers = {key: part.long() for key, part in arrays.items()}
        check_finite(edge_feat, "edge_feat")
        nodes = numbers["num_nodes"]
        edges = numbers["num_edges"]
        check_indices(
            numbers["edge_index_local"],
            nodes.repeat_interleave(edges),
            "edge_index_local",
        )
        limits = {"atom_type": _ATOMS, "y": 2, "node_label": 2}
        limits |= dict.fromkeys(("train_index", "test_index"), len(nodes))
        for name, below in limits.items():
            check_indices(numbers[name], below, name)
        chosen = torch.cat([numbers["train_index"], numbers["test_index"]])
        if len(chosen.unique()) < len(chosen):
            raise ValueError("a molecule is twice in train_index and test_index")
        # `split` refuses sizes that do not add up to the length.
        parts = {
            "x": one_hot(numbers["atom_type"]).float().split(nodes.tolist()),
            "edge_index": numbers["edge_index_local"].split(edges.tolist(), dim=1),
            "edge_attr": edge_feat.split(edges.tolist()),
            "y": numbers["y"].split(1),
            "node_label": numbers["node_label"].split(nodes.tolist()),
        }
        return [
            Data(**{key: part[row] for key, part in parts.items()})
            for row in numbers[f"{split}_index"].tolist()
        ]


_MOLECULES = "raw/peptide_multi_class_dataset.csv.gz"
_SPLIT = "splits_random_stratified_peptide.npz"
_CLASSES = 10
_ROWS = 15_535
_LRGB = "Fetch it anew, from https://github.com/vijaydwivedi75/lrgb."


class PeptidesFunctional(CachedDataset):
    """Peptides-func (Dwivedi et al. 2022): 15 535 peptides with ten binary labels.

    The graphs are made once from SMILES strings by PyG's `from_smiles` (extra `molecules`), which takes a few minutes.
    Nodes are heavy atoms, edges are bonds. PyG numbers the same nine atom features and three bond features as the Long
    Range Graph Benchmark, but from other lists: a model of one does not read the other. PyG's `LRGBDataset` unpickles
    its files.

    Args:
        source: the folder with `raw/peptide_multi_class_dataset.csv.gz` (columns smiles and labels) and
            `splits_random_stratified_peptide.npz` (row numbers by split). It may be read-only.
        root: a writable folder. Graphs are kept in `root/processed/<parameters>`.
        split: "train", "val" or "test".
        num_graphs: how many graphs of the split, from its beginning. By default all.
        options: transform and pre_transform of `CachedDataset`.

    Shapes:
        x: [N, 9], integers.
        edge_attr: [E, 3], integers.
        edge_index: [2, E] in both directions.
        y: [1, 10] of 0 and 1, float.

    Raises:
        FileNotFoundError: a file is missing. The message says where to get it.
        ValueError: a file is damaged.

    Examples:
        >>> PeptidesFunctional(folder, folder / "cache")  # says what to put where
        Traceback (most recent call last):
        FileNotFoundError: Peptides-func...raw/peptide_multi_class_dataset.csv.gz...
    """

    @checked
    def __init__(
        self,
        source: str | Path,
        root: str | Path,
        split: Literal["train", "val", "test"] = "train",
        *,
        num_graphs: Count | None = None,
        **options: Any,
    ) -> None:
        self.source = as_path(source, "source")
        self.split = split
        table = self.source / _MOLECULES
        official = self.source / _SPLIT
        benchmark = "the files of the Long Range Graph Benchmark (https://github.com/vijaydwivedi75/lrgb)"
        way_out = f"Put {benchmark} there, under these names."
        check_present("Peptides-func", self.source, [table, official], way_out)
        with reading(official, _LRGB):
            rows = read_npz(official, [split], _LARGEST)[split]
            check_indices(torch.from_numpy(rows), _ROWS, f"the rows of {split}")
            self._rows = rows.tolist()
        size = len(self._rows)
        if num_graphs is not None and num_graphs > size:
            raise ValueError(
                f"num_graphs must be at most {size}, the size of {split}; got {num_graphs}."
            )
        self._rows = self._rows[:num_graphs]
        super().__init__(
            root, f"peptides-func-{split}-{len(self._rows)}", len(self._rows), **options
        )

    def make(self) -> Iterator[Data]:
        with needed_by("PeptidesFunctional", "diffusion-mp-experiments[molecules]"):
            import_module("rdkit")
        path = self.source / _MOLECULES
        with reading(path, _LRGB):
            with gzip.open(path) as file:
                text = file.read(_LARGEST + 1)
            if len(text) > _LARGEST:
                raise ValueError(
                    f"it unpacks into more than {_LARGEST} bytes, and the table has 7 million"
                )
            molecules = list(
                csv.DictReader(io.StringIO(text.decode("utf-8-sig"), newline=""))
            )
            for row in self._rows:
                data = from_smiles(molecules[row]["smiles"])
                labels = json.loads(molecules[row]["labels"])
                if (
                    data.num_nodes == 0
                ):  # what PyG makes of a string that rdkit cannot read
                    raise ValueError(
                        f"Row {row} of {_MOLECULES} is no molecule: {molecules[row]['smiles']!r}."
                    )
                if len(labels) != _CLASSES or not {0, 1}.issuperset(labels):
                    raise ValueError(
                        f"Row {row} of {_MOLECULES} must have {_CLASSES} labels 0 or 1; got {labels}."
                    )
                data.y = torch.tensor([labels], dtype=torch.float)
                del data.smiles
                yield data
