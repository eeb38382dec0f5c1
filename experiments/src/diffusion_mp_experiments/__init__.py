"""What reproduces the papers with `diffusion_mp`: data sets, training, tables of results, the command line.

- `files`: reading files from anywhere, safely.
- `graphs`: data sets of graphs, read or drawn.
- `sequences`: data sets of sequences, read or drawn.
- `reproduce`: tables of results, from a folder of YAML files to a page.
- `train`: Lightning modules, checkpoints that resume bit for bit, and `diffusion-mp` on the command line.

A distribution of its own (`diffusion-mp-experiments`), which imports the library and is not imported by it.
"""
