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
    assert_close,
    assert_equals_reference,
    attention_inputs,
    everything,
)
from torch import Tensor

from diffusion_mp.errors import BackendError
from diffusion_mp.kernels.linear_attention import Terms, linear_attention
from diffusion_mp.kernels.linear_attention import triton as linear_kernels
from diffusion_mp.kernels.neumann import _inner, neumann_product
from diffusion_mp.kernels.neumann.stencil import Stencil
from diffusion_mp.kernels.pairwise import SCORES, pairwise_attention
from diffusion_mp.kernels.sparse_flow import sparse_flow_potentials
from diffusion_mp.testing import tolerance
from subrun import run_program

pytestmark = pytest.mark.usefixtures("poisoned")


def randn(*shape: int, generator: torch.Generator) -> Tensor:
    """The same numbers on every device."""
    return torch.randn(*shape, generator=generator).to(DEVICE)


def flow_inputs(n, heads, features, friction, channels, generator):
    """q, k, q̃, k̃, λ, 1/α and v, with scores of unit variance or less."""
    widths = (features, features, friction, friction)
    scores = [
        randn(n, heads, width, generator=generator) / max(1, width) ** 0.25 for width in widths
    ]
    lam, leak = (randn(n, heads, generator=generator).exp() for _ in range(2))
    return [*scores, lam / max(1, n), leak, randn(n, heads, channels, generator=generator)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*OPTIONS, *(f"{score}-attention" for score in SCORES), "flow"])
def test_half_precision(name: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Of features and values; λ and α are numbers of rows, whose gradients are differences of large numbers."""
    *features, lam, leak, v = flow_inputs(70, 1, 9, 5, 20, generator)
    run = ATTENTION.get(name)
    inputs = [*features[:2], v]
    if name == "flow":
        inputs = [*features, v]

        def run(q: Tensor, k: Tensor, fq: Tensor, fk: Tensor, v: Tensor, backend: str) -> Tensor:
            return everything(q, k, fq, fk, lam, leak, v, backend=backend)

    assert_equals_reference(run, inputs, generator, dtype)


@pytest.mark.parametrize("name", ["plain", "sigmoid-attention", "flow"])
def test_inputs_are_read_where_they_lie(name: str, generator: torch.Generator) -> None:
    """An expanded head axis, columns of a wider tensor, and rows that are not contiguous."""
    wide = 0.5 * randn(40, 2, 12, generator=generator)
    q = wide[:, :1, :5].expand(-1, 2, -1)
    k = wide[..., 5:10]
    v = randn(40, 3, 2, generator=generator).transpose(1, 2)
    inputs = [q, k, v]
    if name == "flow":
        lam, leak = (randn(40, 2, generator=generator).exp() for _ in range(2))
        inputs = [q, k, k, q, lam[:, :1].expand(-1, 2) / 40, leak, v]
    run = everything if name == "flow" else ATTENTION[name]
    got, expected = (run(*inputs, backend=backend) for backend in ("triton", "reference"))
    torch.testing.assert_close(got, expected, **tolerance("product", torch.float32)._asdict())


# A program meets all columns, 64 at a time or, in the wide case, 32: more blocks only take time.
FEW = ("no node", "one node", "odd", "wide", "ragged")


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *((name, case) for name in ATTENTION if name != "linear product" for case in FEW),
        *(("difformer", case) for case in ("500", "1000", "empty at both ends")),
        pytest.param("difformer", "4097", marks=pytest.mark.exhaustive),
    ],
)
def test_attention(name: str, case: str, generator: torch.Generator) -> None:
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
@pytest.mark.parametrize("name", ["difformer", *(f"{score}-attention" for score in SCORES)])
def test_tiles_of_a_large_graph(
    name: str, features: int, channels: int, generator: torch.Generator
) -> None:
    """They have more rows than those of a small graph, and other instructions multiply them."""
    inputs = [
        randn(4201, 4, width, generator=generator) for width in (features, features, channels)
    ]
    inputs[:2] = [x / features**0.25 for x in inputs[:2]]
    assert_equals_reference(ATTENTION[name], inputs, generator)


@pytest.mark.slow
@pytest.mark.parametrize("n", [500, 1000, 4097])
def test_many_blocks_of_columns(n: int, generator: torch.Generator) -> None:
    inputs = [randn(n, 1, width, generator=generator) for width in (3, 3, 2)]
    for score in SCORES:
        assert_equals_reference(partial(pairwise_attention, score=score), inputs, generator)
    assert_equals_reference(everything, flow_inputs(n, 1, 3, 2, 2, generator), generator)


@pytest.mark.parametrize("sizes", [[3000], [2000, 0, 1000]])
def test_the_states_of_many_runs_are_summed(sizes: list[int]) -> None:
    """Also of a graph without any node; Σ_j k_j of 3 000 ones is exact in float16."""
    one = torch.ones(3000, 1, 1, dtype=torch.float16, device=DEVICE)
    out, den, *_ = linear_kernels.forward(
        one, one, one, Terms(kernel_cases.boundaries(sizes)[0] if len(sizes) > 1 else None)
    )
    assert torch.equal(out, one)
    expected = torch.cat([torch.full((size, 1), float(size), device=DEVICE) for size in sizes])
    assert torch.equal(den, expected)


def test_zero_rows_and_zero_vectors(generator: torch.Generator) -> None:
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
    DEVICE.type != "cpu", reason="is about tensors on the CPU, which only the interpreter takes"
)
def test_what_is_declined(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(width: int, backend: str, dtype: torch.dtype = torch.float32) -> Tensor:
        inputs = [randn(4, 1, width, generator=generator).to(dtype) for _ in range(3)]
        return ATTENTION["difformer"](*inputs, backend=backend)

    with pytest.raises(BackendError, match="neither float32 nor half precision"):
        run(3, "triton", torch.float64)
    with pytest.raises(BackendError, match="at most 256 channels, and a tensor has 257"):
        run(257, "triton")
    with pytest.raises(BackendError, match="at most 128 channels, and a tensor has 129"):
        everything(*flow_inputs(3, 1, 4, 129, 2, generator), backend="triton")
    monkeypatch.setattr(linear_kernels, "forward", None)
    assert run(3, "auto").isfinite().all()  # the interpreter is too slow to be chosen automatically
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(BackendError, match="not on a GPU"):
        run(3, "triton")


# Nodes of one graph or of the graphs of a batch, heads, features, friction features, channels.
FLOWS: dict[str, tuple[int | list[int], int, int, int, int]] = {
    "no node": (0, 1, 3, 3, 3),
    "one node": (1, 2, 8, 8, 8),
    "odd": (63, 2, 7, 20, 33),
    "constant friction": (130, 1, 20, 0, 5),
    "ragged": ([3, 0, 70, 0], 2, 5, 2, 3),
}


@pytest.mark.parametrize(
    ("sizes", "heads", "features", "friction", "channels"), FLOWS.values(), ids=FLOWS
)
def test_sparse_flow(sizes, heads, features, friction, channels, generator):
    ptr, n = kernel_cases.boundaries(sizes)
    inputs = flow_inputs(n, heads, features, friction, channels, generator)
    assert_equals_reference(partial(everything, ptr=ptr), inputs, generator)
    ours, truth = (
        sparse_flow_potentials(*(t.to(dtype) for t in inputs[:6]), ptr, backend=backend)
        for dtype, backend in ((torch.float32, "triton"), (torch.float64, "reference"))
    )
    for got, expected in zip(ours, truth, strict=True):
        assert_close(got, expected.double(), "product", torch.float32)


def test_without_friction_it_is_softmax_and_with_too_much_nothing_flows(
    generator: torch.Generator,
) -> None:
    """Also in the gradient of λ, one-sided at zero; where every threshold is above α the potential is α."""
    q, k, fq, fk, lam, leak, v = flow_inputs(20, 2, 3, 2, 4, generator)
    assert_equals_reference(everything, [q, k, fq, fk, 0 * lam, leak, v], generator)
    got = everything(q, k, fq, fk, 0 * lam, 0 * leak, v, backend="triton")[..., :4]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(0, 1) for t in (q, k, v)), scale=1.0
    )
    torch.testing.assert_close(
        got, expected.transpose(0, 1), **tolerance("product", torch.float32)._asdict()
    )
    assert_equals_reference(everything, [q, k, fq, fk, 1000 + lam, 10 + leak, v], generator)


# Lengths of the sequences, heads, channels, strides: shorter and longer than a run of rows and than the sequence.
SEQUENCES: dict[str, tuple[int | list[int], int, int, tuple[int, ...]]] = {
    "one row": (1, 1, 2, (1, 3)),
    "two runs": (130, 2, 3, (1, 70, 500)),
    "ragged": ([3, 1, 0, 12, 70], 1, 20, (2, 2, 37)),
}


@pytest.mark.parametrize("boundary", ["symmetric", "replicate", "drop", "periodic", "causal"])
@pytest.mark.parametrize(
    ("sizes", "heads", "channels", "strides"), SEQUENCES.values(), ids=SEQUENCES
)
@pytest.mark.parametrize("transpose", [False, True])
def test_stencils(sizes, heads, channels, strides, boundary, transpose, generator):
    ptr, n = kernel_cases.boundaries(sizes)
    inputs = [
        randn(n, heads, channels, generator=generator),
        randn(len(strides), heads, generator=generator),
    ]
    run = partial(neumann_product, strides=strides, boundary=boundary, ptr=ptr, transpose=transpose)
    assert_equals_reference(run, inputs, generator)


@pytest.mark.parametrize("boundary", ["symmetric", "causal"])
def test_inner_products(boundary: str, generator: torch.Generator) -> None:
    """Over more channels than one program has, and none at all."""
    for n in (0, 70):
        g, v = (randn(n, 2, 40, generator=generator) for _ in range(2))
        got = _inner(g, v, Stencil([1, 4], boundary, None), backend="triton")
        expected = _inner(
            g.double(), v.double(), Stencil([1, 4], boundary, None), backend="reference"
        )
        assert_close(got, expected, "gradient", torch.float32)


# Shared memory that one program may take on any GPU since the RTX 30 series; an H100 has more.
LIMIT = 99 * 1024


SLOW = [("float16", 256), ("bfloat16", 8), ("float32", 64), ("float32", 128), ("float32", 256)]


@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        pytest.param("bfloat16", 64, marks=pytest.mark.exhaustive),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_every_kernel_compiles(dtype: str, width: int, tmp_path: Path) -> None:
    program = str(Path(__file__).with_name("compile_for_gpu.py"))
    out = run_program(
        program, dtype, str(width), TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)
    )
    shared = [(int(line.split()[1]), line) for line in out.splitlines()]
    assert len(shared) >= 20
    assert max(shared)[0] <= LIMIT, max(shared)
