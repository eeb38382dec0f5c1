"""What reproduces the papers with `diffusion_mp`; a distribution of its own, which the library does not import.

Arguments that do not fit raise TypeError or ValueError, a missing file FileNotFoundError, a damaged one ValueError; the
message says what to do.
"""
