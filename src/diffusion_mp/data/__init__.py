"""Data sets as PyG `Data` and the splits the papers use; nothing here touches the network unless asked to."""

from .digits import load_digits
from .planetoid import load_planetoid
from .splits import Split, label_mask, random_split_per_class

__all__ = ["Split", "label_mask", "load_digits", "load_planetoid", "random_split_per_class"]
