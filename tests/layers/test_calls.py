"""What one layer costs before any arithmetic: calls of the package's functions, and moves between its files.

Small graphs pay for these and for nothing else; who reads along has to follow every move.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import diffusion_mp as mp

PACKAGE = str(Path(mp.__file__).parent)


@contextmanager
def calls() -> Iterator[list[str]]:
    """The file of every call of a function of the package, in order."""
    files: list[str] = []
    before = sys.getprofile()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("layer", "most_calls", "most_files", "most_moves"),
    [(mp.DIFFormerConv(16, 16), 102, 25, 53), (mp.CertifiedConv(16), 183, 30, 105)],
    ids=["DIFFormerConv", "CertifiedConv"],
)
def test_a_layer_takes_few_calls(layer, most_calls, most_files, most_moves, train, no_typecheck):
    graph, x = mp.Graph(50, torch.randint(50, (2, 200))), 0.1 * torch.randn(50, 16)
    with torch.set_grad_enabled(train):
        layer(x, graph)
        with calls() as files:
            layer(x, graph)
    assert len(files) <= most_calls
    assert len(set(files)) <= most_files
    assert sum(a != b for a, b in pairwise(files)) <= most_moves
