"""What stands for every operation in an exported program is what the operation computes, also of ragged batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

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
    for given in arguments(BATCHES[batch])[name]:
        flat, _, _ = operation.signature.bind(given, narrow=False)
        wanted = operation._run(*flat, "cpu")
        found = formula(*flat)
        if isinstance(wanted, Tensor):
            wanted = (wanted,)
            found = (found,)
        fields = operation.signature.results
        for field, want, got in zip(fields, wanted, found, strict=True):
            if field not in KERNELS_ONLY.get(name, ()):
                torch.testing.assert_close(
                    got,
                    want,
                    rtol=1e-9,
                    atol=1e-9,
                    msg=lambda text, f=field: f"{f}: {text}",
                )


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
    from diffusion_mp.export import plain as formulas

    batch = torch.tensor([0, 0, 2, 2, 2, 5])
    assert torch.equal(formulas.batch_pointers(batch), graph_ops.batch_pointers(batch))
    assert torch.equal(
        formulas.batch_pointers(batch[:0]), graph_ops.batch_pointers(batch[:0])
    )
    source, target = edges = torch.randint(
        7, (2, 30), generator=torch.Generator().manual_seed(1)
    )
    for got, want in zip(
        formulas.compress(target, source, 7),
        graph_ops._compress(target, source, 7),
        strict=True,
    ):
        assert torch.equal(got, want)
    weight = (torch.arange(30) % 4).double()
    for hops in (1, 2, 3):
        assert torch.equal(
            formulas.walk_pairs(edges, weight, 7, hops),
            graph_ops.walk_pairs(edges, weight, 7, hops),
        )
