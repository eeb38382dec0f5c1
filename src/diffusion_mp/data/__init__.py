"""Data sets as PyG `Data` and the splits the papers use; nothing here touches the network unless asked to."""

from .digits import load_digits
from .long_range import load_lrgb
from .peptides import PeptidesFunctional
from .planetoid import load_planetoid
from .positional import AddLaplacianPE
from .sbm import SBMDataset
from .splits import Split, label_mask, random_split_per_class

__all__ = [
    "AddLaplacianPE",
    "PeptidesFunctional",
    "SBMDataset",
    "Split",
    "label_mask",
    "load_digits",
    "load_lrgb",
    "load_planetoid",
    "random_split_per_class",
]
