"""Which model is best on data of one's own."""

from diffusion_mp_experiments.compare.comparison import Comparison, compare

__all__ = ["Comparison", "compare"]
