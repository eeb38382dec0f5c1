"""Energy-constrained diffusion layers for PyTorch Geometric."""

__version__ = "0.1.0"
