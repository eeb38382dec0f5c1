"""What reproduces the papers with `diffusion_mp`; a distribution of its own, which the library does not import.

Arguments that do not fit raise TypeError or ValueError, missing files FileNotFoundError, damaged files ValueError. The
message says what to do.
"""
