"""What reproduces the papers with `diffusion_mp`; a distribution of its own, which the library does not import.

Unfit arguments raise TypeError or ValueError, missing files FileNotFoundError, damaged ones ValueError: with a way out.
"""
