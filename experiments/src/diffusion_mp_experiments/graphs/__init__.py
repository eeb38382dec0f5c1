"""Graphs of the papers, read from published files or drawn; nothing is downloaded unless asked for."""

from diffusion_mp_experiments.graphs.drawn import SBMDataset, synthetic_pokec
from diffusion_mp_experiments.graphs.graph_sets import (
    PeptidesFunctional,
    load_synmol,
    load_tu,
)
from diffusion_mp_experiments.graphs.node_sets import (
    load_digits,
    load_facebook,
    load_heterophilous,
    load_mnist,
    load_newsgroups,
    load_rows,
)
from diffusion_mp_experiments.graphs.ogb import SumEdgeFeatures, load_ogb
from diffusion_mp_experiments.graphs.planetoid import load_planetoid
from diffusion_mp_experiments.graphs.pokec import load_pokec
from diffusion_mp_experiments.graphs.temporal import fit_forecast, load_snapshots

__all__ = [
    "PeptidesFunctional",
    "SBMDataset",
    "SumEdgeFeatures",
    "fit_forecast",
    "load_digits",
    "load_facebook",
]
__all__ += [
    "load_heterophilous",
    "load_mnist",
    "load_newsgroups",
    "load_ogb",
    "load_planetoid",
    "load_pokec",
    "load_rows",
]
__all__ += ["load_snapshots", "load_synmol", "load_tu", "synthetic_pokec"]
