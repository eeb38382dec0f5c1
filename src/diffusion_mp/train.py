"""Training is `diffusion_mp_experiments.train` now; its names are found here for one more version, with a warning."""

from diffusion_mp.moved import names_before

__getattr__ = names_before(__name__)
