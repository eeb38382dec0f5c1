"""What stands for every operation in an exported program is what the operation computes, also of ragged batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffusion_mp.export import plain
from diffusion_mp.export.plain import FORMULAS
from diffusion_mp.graph import ops as graph_ops
from operation_cases import BATCHES, OPERATIONS, arguments

REGISTERED = {
    name.removeprefix("diffusion_mp::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("diffusion_mp::")
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", [op.name for op in FORMULAS])
def test_a_formula_computes_the_operation(name: str, batch: str) -> None:
    operation = OPERATIONS[name]
    _, formula = operation.written_out(FORMULAS[operation])
    for case in arguments(BATCHES[batch])[name]:
        flat, _, _ = operation.signature.bind(case, narrow=False)
        expected = operation._run(*flat, "cpu")
        got = formula(*flat)
        if isinstance(expected, Tensor):
            expected = (expected,)
            got = (got,)
        for field, one, other in zip(
            operation.signature.results, got, expected, strict=True
        ):
            if field not in KERNELS_ONLY.get(name, ()):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


#: Results that a kernel keeps for its derivative, and that an exported program does not read.
KERNELS_ONLY = {
    "sparse_flow_potentials": ("slope", "drag", "work", "support"),
    "linear_attention": ("den", "pooled"),
    "pairwise_attention": ("lse",),
}


def test_every_operation_of_a_forward_pass_has_a_formula() -> None:
    backward = {
        name
        for name in REGISTERED
        if name.endswith("_backward") or name == "pairwise_gradient"
    }
    training = {"gumbel", "take_step"}
    others = {"batch_pointers", "compress", "walk_pairs"}
    assert REGISTERED - backward - training - others == {op.name for op in FORMULAS}


def test_pointers_order_and_walks() -> None:
    batch = torch.tensor([0, 0, 2, 2, 2, 5])
    for each in (batch, batch[:0]):
        assert torch.equal(plain.batch_pointers(each), graph_ops.batch_pointers(each))
    edges = torch.randint(7, (2, 30), generator=torch.Generator().manual_seed(1))
    source, target = edges
    got = plain.compress(target, source, 7)
    torch.testing.assert_close(got, graph_ops._compress(target, source, 7))
    weight = (torch.arange(30) % 4).double()
    for hops in (1, 2, 3):
        got = plain.walk_pairs(edges, weight, 7, hops)
        assert torch.equal(got, graph_ops.walk_pairs(edges, weight, 7, hops))
