"""What stands for every operation in an exported program is what the operation computes, also of ragged batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from diffusion_mp.export.plain import FORMULAS
from diffusion_mp.graph import ops as graph_ops
from diffusion_mp.graph.ops import Compressed, Pattern
from diffusion_mp.kernels.linear_attention.reference import Terms
from diffusion_mp.kernels.log_linear_attention.reference import Receivers, Senders
from diffusion_mp.kernels.neumann.stencil import Stencil
from diffusion_mp.kernels.pairwise.scores import Weighting
from diffusion_mp.kernels.sparse_flow import sparse_flow_potentials
from diffusion_mp.kernels.sparse_flow.rows import Features
from diffusion_mp.kernels.spmm import Rows

N, H = 13, 2
BATCHES = {"one graph": None, "ragged": torch.tensor([0, 5, 5, 6, 13])}

REGISTERED = {
    name.removeprefix("diffusion_mp::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("diffusion_mp::")
}


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.double)


def arguments(ptr: Tensor | None) -> dict[str, list[tuple[Any, ...]]]:
    """Of every operation, by its name, some."""
    q, k, v, few = draw(N, H, 3), draw(N, H, 4)[..., :3], draw(N, H, 5), draw(N, H, 1)
    source, target = torch.randint(N, (2, 40), generator=torch.Generator().manual_seed(0))
    rows, cols = Compressed(target, source, N), Compressed(source, target, N)
    entries = Pattern(rows, cols).both_ways()
    weight, prior = draw(40, H).abs(), (draw(40, 1) > -1).double()
    shift = draw(N, H)
    features, lam, leak = Features(q, k, draw(N, H, 2), draw(N, H, 7)[..., :2]), shift.exp(), 0.1 * shift.abs()
    terms = sparse_flow_potentials(*features, lam, leak, ptr).terms
    without_friction = Features(q, k, q[..., :0], k[..., :0])
    scores = draw(40, H), draw(40, 2 * H)[:, :H]

    def log_sum(x: Tensor) -> Tensor:
        return torch.stack([x[target == node].logsumexp(0) for node in range(N)]).nan_to_num(neginf=0.0)

    stencils = [Stencil([1, 3], kind, ptr) for kind in ("symmetric", "replicate", "drop", "periodic", "causal")]
    return {
        "spmm": [(entries, weight, v), (entries.T, weight[:, :1], v)],
        "sddmm": [(entries, q, k)],
        "row_sums": [(Rows.of(rows), weight)],
        "at_rows": [(Rows.of(rows), shift)],
        "edge_softmax": [(Rows.of(rows), scores[0], None), (Rows.of(rows), scores[0], prior)],
        "linear_product": [(q, k, v, ptr)],
        "linear_attention": [(q, k, v, Terms(ptr, 1.0, 0.5, unit)) for unit in (True, False)],
        "log_linear_attention": [
            (Receivers(q, given), Senders(k, draw(N, H, 2), v), ptr) for given in (None, draw(N, H, 3)[..., :2])
        ],
        "log_linear_entries": [(torch.stack([source, target]), q, k)],
        "pairwise_attention": [
            *((q, k, v, ptr, score, True, False, False) for score in ("exp", "sigmoid")),
            (q, k, v[..., :0], ptr, "sigmoid", False, False, True),
        ],
        "pairwise_product": [
            (q, k, v, Weighting(shift, None, ptr, "exp")),
            (q, k, v, Weighting(shift, few[..., 0], ptr, "sigmoid", False)),
            (q, q, v, Weighting(None, None, ptr, "sigmoid", mutual=True)),
        ],
        "sparse_flow_potentials": [(f, lam, leak, ptr) for f in (features, without_friction)],
        "sparse_flow_product": [(features, v, terms, ptr, transpose) for transpose in (False, True)],
        "sparse_flow_support": [(*scores, log_sum(-scores[0]), log_sum(scores[1]), lam, leak, target)],
        "neumann_product": [(v, draw(2, H), s, transpose) for s in stencils for transpose in (False, True)],
        "neumann_inner": [(q, k, s) for s in stencils],
        "neumann_transform": [(v, kind, inverse, ptr) for kind in (False, True) for inverse in (False, True)],
    }


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", [op.name for op in FORMULAS])
def test_a_formula_computes_the_operation(name: str, batch: str) -> None:
    (operation,) = (op for op in FORMULAS if op.name == name)
    _, formula = operation.written_out(FORMULAS[operation])
    for given in arguments(BATCHES[batch])[name]:
        flat, _, _ = operation._signature.bind(given, narrow=False)
        wanted, found = operation._run(*flat, "cpu"), formula(*flat)
        if isinstance(wanted, Tensor):
            wanted, found = (wanted,), (found,)
        fields = operation._signature.results
        for field, want, got in zip(fields, wanted, found, strict=True):
            if field not in KERNELS_ONLY.get(name, ()) and (want.numel() or field not in MAY_BE_NONE.get(name, ())):
                torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, msg=lambda text, f=field: f"{f}: {text}")


#: Results that a kernel keeps for its derivative, and that an exported program does not read.
KERNELS_ONLY = {
    "sparse_flow_potentials": ("slope", "drag", "work", "support"),
    "linear_attention": ("den", "pooled"),
    "pairwise_attention": ("lse",),
}

#: Results that a kernel returns for some arguments only.
MAY_BE_NONE = {"log_linear_attention": ("log_sum",)}


def test_every_operation_of_a_forward_pass_has_a_formula() -> None:
    backward = {name for name in REGISTERED if name.endswith("_backward") or name == "pairwise_gradient"}
    halves = {name for name in REGISTERED if name.endswith(("_pool", "_read"))}  # of a graph over several processes
    training = {"gumbel", "take_step"}
    others = {"batch_pointers", "compress", "walk_pairs"}
    assert REGISTERED - backward - halves - training - others == {op.name for op in FORMULAS}


def test_pointers_order_and_walks() -> None:
    from diffusion_mp.export import plain as formulas

    batch = torch.tensor([0, 0, 2, 2, 2, 5])
    assert torch.equal(formulas.batch_pointers(batch), graph_ops.batch_pointers(batch))
    assert torch.equal(formulas.batch_pointers(batch[:0]), graph_ops.batch_pointers(batch[:0]))
    source, target = edges = torch.randint(7, (2, 30), generator=torch.Generator().manual_seed(1))
    for got, want in zip(formulas.compress(target, source, 7), graph_ops._compress(target, source, 7), strict=True):
        assert torch.equal(got, want)
    weight = (torch.arange(30) % 4).double()
    for hops in (1, 2, 3):
        assert torch.equal(formulas.walk_pairs(edges, weight, 7, hops), graph_ops.walk_pairs(edges, weight, 7, hops))
