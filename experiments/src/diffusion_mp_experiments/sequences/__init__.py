"""Tasks on long sequences of tokens: drawn item by item, or read from published files."""

from diffusion_mp_experiments.sequences.dataset import IMDb, SequenceDataset
from diffusion_mp_experiments.sequences.listops import ListOps
from diffusion_mp_experiments.sequences.pathfinder import Pathfinder

__all__ = ["IMDb", "ListOps", "Pathfinder", "SequenceDataset"]
