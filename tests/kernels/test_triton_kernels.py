"""The GPU kernels, run by Triton's interpreter, against the references in double precision."""

from functools import partial
from pathlib import Path

import kernel_cases
import pytest
import torch
from kernel_cases import (
    ATTENTION,
    DEVICE,
    OPTIONS,
    assert_equals_reference,
    attention_inputs,
)
from torch import Tensor

from diffusion_mp.errors import BackendError
from diffusion_mp.kernels.linear_attention import Terms, linear_attention
from diffusion_mp.kernels.linear_attention import triton as linear_kernels
from diffusion_mp.kernels.pairwise import SCORES
from helpers import close
from subrun import run_program

pytestmark = pytest.mark.usefixtures("poisoned")


def randn(*shape: int, generator: torch.Generator) -> Tensor:
    """The same numbers on every device."""
    return torch.randn(*shape, generator=generator).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", [*OPTIONS, *(f"{score}-attention" for score in SCORES)]
)
def test_half_precision(name, dtype, generator):
    """Of features and values, with scores of unit variance."""
    q, k = (randn(70, 1, 9, generator=generator) / 9**0.25 for _ in range(2))
    v = randn(70, 1, 20, generator=generator)
    assert_equals_reference(ATTENTION[name], [q, k, v], generator, dtype)


@pytest.mark.parametrize("name", ["plain", "sigmoid-attention"])
def test_inputs_are_read_where_they_lie(name, generator):
    """An expanded head axis, columns of a wider tensor, and rows that are not contiguous."""
    wide = 0.5 * randn(40, 2, 12, generator=generator)
    q = wide[:, :1, :5].expand(-1, 2, -1)
    k = wide[..., 5:10]
    v = randn(40, 3, 2, generator=generator).transpose(1, 2)
    got, expected = (
        ATTENTION[name](q, k, v, backend=backend) for backend in ("triton", "reference")
    )
    close(got, expected)


# A program meets all columns, 64 at a time or, in the wide case, 32: more blocks only take time.
FEW = ("no node", "one node", "odd", "wide", "ragged")


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *(
            (name, case)
            for name in ATTENTION
            if name != "linear product"
            for case in FEW
        ),
        *(("difformer", case) for case in ("500", "1000", "empty at both ends")),
        pytest.param("difformer", "4097", marks=pytest.mark.exhaustive),
    ],
)
def test_attention(name, case, generator):
    inputs, ptr = attention_inputs(case, generator)
    assert_equals_reference(partial(ATTENTION[name], ptr=ptr), inputs, generator)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="takes the interpreter minutes")
@pytest.mark.parametrize(
    ("features", "channels"),
    [
        (16, 16),
        (20, 33),
        (32, 32),
        (32, 64),
        (64, 32),
        (64, 1),
        (64, 64),
        (48, 128),
        (128, 48),
        (128, 128),
    ],
)
@pytest.mark.parametrize(
    "name", ["difformer", *(f"{score}-attention" for score in SCORES)]
)
def test_tiles_of_a_large_graph(name, features, channels, generator):
    """They have more rows than those of a small graph, and other instructions multiply them."""
    inputs = [
        randn(4201, 4, width, generator=generator)
        for width in (features, features, channels)
    ]
    inputs[:2] = [x / features**0.25 for x in inputs[:2]]
    assert_equals_reference(ATTENTION[name], inputs, generator)


@pytest.mark.parametrize("sizes", [[3000], [2000, 0, 1000]])
def test_the_states_of_many_runs_are_summed(sizes):
    """Also of a graph without any node; Σ_j k_j of 3 000 ones is exact in float16."""
    one = torch.ones(3000, 1, 1, dtype=torch.float16, device=DEVICE)
    out, den, *_ = linear_kernels.forward(
        one,
        one,
        one,
        Terms(kernel_cases.boundaries(sizes)[0] if len(sizes) > 1 else None),
    )
    assert torch.equal(out, one)
    expected = torch.cat(
        [torch.full((size, 1), float(size), device=DEVICE) for size in sizes]
    )
    assert torch.equal(den, expected)


def test_zero_rows_and_zero_vectors(generator):
    q, k, v = (randn(4, 1, 3, generator=generator) for _ in range(3))
    sparse = q * torch.tensor([1.0, 0, 1, 0], device=DEVICE)[:, None, None]
    for unit in (False, True):
        assert_equals_reference(
            partial(linear_attention, unit=unit), [sparse, k.abs(), v], generator
        )
    # scores cancel exactly, values do not
    rounded = (3 * q).round()
    opposite = torch.cat([k[:2], -k[:2]]).sign()
    assert_equals_reference(linear_attention, [rounded, opposite, v], generator)
    assert_equals_reference(ATTENTION["difformer"], [sparse, k, v], generator)


@pytest.mark.skipif(
    DEVICE.type != "cpu",
    reason="is about tensors on the CPU, which only the interpreter takes",
)
def test_what_is_declined(generator, monkeypatch):
    def run(width: int, backend: str, dtype: torch.dtype = torch.float32) -> Tensor:
        inputs = [randn(4, 1, width, generator=generator).to(dtype) for _ in range(3)]
        return ATTENTION["difformer"](*inputs, backend=backend)

    with pytest.raises(BackendError, match="neither float32 nor half precision"):
        run(3, "triton", torch.float64)
    with pytest.raises(
        BackendError, match="at most 256 channels, and a tensor has 257"
    ):
        run(257, "triton")
    monkeypatch.setattr(linear_kernels, "forward", None)
    assert (
        run(3, "auto").isfinite().all()
    )  # the interpreter is too slow to be chosen automatically
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(BackendError, match="not on a GPU"):
        run(3, "triton")


# Shared memory that one program may take on any GPU since the RTX 30 series; an H100 has more.
LIMIT = 99 * 1024


SLOW = [
    ("float16", 256),
    ("bfloat16", 8),
    ("float32", 64),
    ("float32", 128),
    ("float32", 256),
]


@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        pytest.param("bfloat16", 64, marks=pytest.mark.exhaustive),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_every_kernel_compiles(dtype, width, tmp_path):
    program = str(Path(__file__).with_name("compile_for_gpu.py"))
    out = run_program(
        program, dtype, str(width), TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)
    )
    shared = [(int(line.split()[1]), line) for line in out.splitlines()]
    assert len(shared) >= 10
    assert max(shared)[0] <= LIMIT, max(shared)
