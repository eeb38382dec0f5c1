"""The overhead of a forward pass, which dominates on small graphs: calls of functions, and moves between files."""

import sys
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import diffusion_mp as mp

PACKAGE = str(Path(mp.__file__).parent)


@contextmanager
def calls():
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
@pytest.mark.parametrize(("module", "most_calls", "most_files", "most_moves"), [
    # With the questions of a graph whether its tensors were written to: 3, 8 and 18 calls.
    (mp.DIFFormerConv(16, 16), 65, 18, 44),
    (mp.CertifiedConv(16), 86, 22, 60),
    (mp.NodeFormer(16, 16, 4, num_layers=2).eval(), 267, 26, 180),
], ids=["DIFFormerConv", "CertifiedConv", "NodeFormer of two layers"])  # fmt: skip
def test_a_forward_pass_takes_few_calls(module, most_calls, most_files, most_moves, train, no_typecheck):
    graph, x = mp.Graph(50, torch.randint(50, (2, 200))), 0.1 * torch.randn(50, 16)
    with torch.set_grad_enabled(train):
        module(x, graph)
        with calls() as files:
            module(x, graph)
    moves = sum(a != b for a, b in pairwise(files))
    found = len(files), len(set(files)), moves
    assert all(a <= b for a, b in zip(found, (most_calls, most_files, most_moves), strict=True)), found
