"""Graphs of the papers, read from published files or drawn; nothing is downloaded unless asked for."""

from diffusion_mp_experiments.graphs.digits import load_digits
from diffusion_mp_experiments.graphs.edge_sums import SumEdgeFeatures
from diffusion_mp_experiments.graphs.facebook import load_facebook
from diffusion_mp_experiments.graphs.forecasts import fit_forecast
from diffusion_mp_experiments.graphs.heterophilous import load_heterophilous
from diffusion_mp_experiments.graphs.mnist import load_mnist
from diffusion_mp_experiments.graphs.newsgroups import load_newsgroups
from diffusion_mp_experiments.graphs.ogb import load_ogb
from diffusion_mp_experiments.graphs.peptides import PeptidesFunctional
from diffusion_mp_experiments.graphs.planetoid import load_planetoid
from diffusion_mp_experiments.graphs.pokec import load_pokec
from diffusion_mp_experiments.graphs.sbm import SBMDataset
from diffusion_mp_experiments.graphs.synmol import load_synmol
from diffusion_mp_experiments.graphs.synthetic_pokec import synthetic_pokec
from diffusion_mp_experiments.graphs.temporal import load_snapshots
from diffusion_mp_experiments.graphs.tu import load_tu

__all__ = [
    "PeptidesFunctional",
    "SBMDataset",
    "SumEdgeFeatures",
    "fit_forecast",
    "load_digits",
    "load_facebook",
    "load_heterophilous",
    "load_mnist",
    "load_newsgroups",
    "load_ogb",
    "load_planetoid",
    "load_pokec",
    "load_snapshots",
    "load_synmol",
    "load_tu",
    "synthetic_pokec",
]
