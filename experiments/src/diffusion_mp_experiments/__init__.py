"""What reproduces the papers with the library, and is no part of it: data sets, training, the command line.

- `files`: reading files from anywhere, safely.
- `graphs`: data sets of graphs, read or drawn.
- `sequences`: data sets of sequences, read or drawn.
- `train`: Lightning modules, checkpoints that resume bit for bit, and `diffusion-mp` on the command line.

Everything here imports the library; nothing in the library imports anything here.
"""
