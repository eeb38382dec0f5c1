"""Graphs of the papers, read from published files or drawn; nothing is downloaded unless asked for."""

from diffusion_mp.experiments.graphs.digits import load_digits
from diffusion_mp.experiments.graphs.ogb import load_ogb
from diffusion_mp.experiments.graphs.peptides import PeptidesFunctional
from diffusion_mp.experiments.graphs.planetoid import load_planetoid
from diffusion_mp.experiments.graphs.pokec import load_pokec
from diffusion_mp.experiments.graphs.sbm import SBMDataset
from diffusion_mp.experiments.graphs.synthetic_pokec import synthetic_pokec

__all__ = [
    "PeptidesFunctional",
    "SBMDataset",
    "load_digits",
    "load_ogb",
    "load_planetoid",
    "load_pokec",
    "synthetic_pokec",
]
