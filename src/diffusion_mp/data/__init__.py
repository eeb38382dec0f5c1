"""Graphs, sequences of tokens and splits, as the papers use them; nothing here touches the network unless asked to."""

from .clusters import find_clusters
from .digits import load_digits
from .imdb import IMDb
from .linkx_splits import load_linkx_splits
from .listops import ListOps, ListOpsFile
from .long_range import load_lrgb
from .lra import GreyCIFAR10, PathfinderFiles, RetrievalPairs
from .ogb import load_ogb
from .part_of import PartOf
from .partition_loader import RandomPartitionLoader
from .pathfinder import Pathfinder
from .peptides import PeptidesFunctional
from .planetoid import load_planetoid
from .pokec import load_pokec
from .positional import AddLaplacianPE
from .sbm import SBMDataset
from .sequences import SequenceDataset, pad
from .splits import Split, label_mask, random_split, random_split_per_class
from .synthetic_pokec import synthetic_pokec

__all__ = [
    "AddLaplacianPE",
    "GreyCIFAR10",
    "IMDb",
    "ListOps",
    "ListOpsFile",
    "PartOf",
    "Pathfinder",
    "PathfinderFiles",
    "PeptidesFunctional",
    "RandomPartitionLoader",
    "RetrievalPairs",
    "SBMDataset",
    "SequenceDataset",
    "Split",
    "find_clusters",
    "label_mask",
    "load_digits",
    "load_linkx_splits",
    "load_lrgb",
    "load_ogb",
    "load_planetoid",
    "load_pokec",
    "pad",
    "random_split",
    "random_split_per_class",
    "synthetic_pokec",
]
