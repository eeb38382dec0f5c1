"""Every public layer and model under every transform of torch: it equals the plain call, or refuses in a sentence.

The sentences of `REFUSED` stand on docs/which-model.md, "With other tools"; no other cell may fail.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.export import export
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)
from torch.testing import assert_close
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import diffusion_mp as dm
from cases import LAYERS as CASES
from cases import SEQUENCES
from diffusion_mp import layers, models
from diffusion_mp.layers import (
    CertifiedBlock,
    LaplacianEncoder,
    RowAttention,
    WeightedGraph,
)
from helpers import built
from model_cases import MODELS, SIZES, graphs
from model_cases import SEQUENCES as LENGTHS

PAGE = Path(__file__).parents[1] / "docs" / "which-model.md"
NODES = 7


class Row(NamedTuple):
    """A layer or model, and the names of its inputs in order; the first one is differentiated if it is a float."""

    build: Callable[[], nn.Module]
    names: tuple[str, ...] = ("x", "edge_index")


#: Layers of the table of `cases` that differ in what runs; called with edges alone, and some with weights and a batch.
EDGES = (
    "appnp",
    "appnp-limit",
    "certified-block",
    "certified-block-at-rest",
    "certified-block-sphere",
    "certified-conv",
    "difformer-conv-gaussian",
    "difformer-conv-tied",
    "difformer-conv-values",
    "gat-concat",
    "gated-gcn-layer-norm",
    "gcnii-plain",
    "generic-equilibrium",
    "generic-heat",
    "generic-implicit",
    "generic-momentum",
    "generic-trapezoidal",
    "gin",
    "gps-block-attention",
    "mlp",
    "multi-head",
    "nodeformer-conv",
    "sfi-conv",
    "sgc",
    "sgformer-conv",
)
WEIGHTS = ("gcn",)
BATCHES = ("difformer-conv", "difformer-conv-softmax")


def distance() -> nn.Module:
    attention = dm.SigmoidDiffusivity(normalize=None, measure="distance")
    return dm.DiffusionConv(4, 4, attention, dm.ExplicitEuler(0.5))


LAYERS: dict[str, Row] = {
    **{name: Row(CASES[name][0]) for name in EDGES},
    **{
        name: Row(CASES[name][0], ("x", "edge_index", "edge_weight"))
        for name in WEIGHTS
    },
    **{
        name: Row(CASES[name][0], ("x", "edge_index", "edge_weight", "batch"))
        for name in BATCHES
    },
    **{
        f"pde-{name}": Row(partial(layers.PDEDiffusion1d, 4, **SEQUENCES[name]), ("x",))
        for name in ("default", "implicit", "periodic")
    },
    "distance": Row(distance),
    "equilibrium-of-attention": Row(
        lambda: dm.DiffusionConv(
            4, 4, dm.SigmoidDiffusivity(), dm.Equilibrium(leak=0.5)
        )
    ),
    "attention-of-neighbours": Row(
        lambda: CertifiedBlock(4, [RowAttention(4, 2, neighbours=True)])
    ),
    "directed-edges": Row(
        lambda: CertifiedBlock(4, [WeightedGraph(4, gate=True, symmetric=False)])
    ),
    "certified-block-limit": Row(
        lambda: CertifiedBlock(4, [WeightedGraph(4)], None, constraint="ball")
    ),
    "certified-conv-limit": Row(
        lambda: dm.CertifiedConv(4, penalty=None, num_layers=None)
    ),
}

LIMITS: dict[str, Row] = {
    "certified-limit": Row(lambda: dm.CertifiedDIFFormer(8, 6, 3, None)),
    "certified-linear-limit": Row(
        lambda: dm.CertifiedDIFFormer(8, 6, 3, None, penalty=None, constraint=None)
    ),
    "label-propagation-limit": Row(
        lambda: dm.LabelPropagation(None), ("y", "edge_index")
    ),
}

ROWS: dict[str, Row] = {
    **{f"layer-{name}": row for name, row in LAYERS.items()},
    **{f"model-{name}": Row(case.build, case.names) for name, case in MODELS.items()},
    **{f"model-{name}": row for name, row in LIMITS.items()},
}


def in_double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


class Subject:
    """A row with double-precision inputs: a function of its leaves, the parameters and the first input."""

    def __init__(self, row: Row, nodes: int = NODES) -> None:
        self.row = row
        self.module = built(row.build).double().eval()
        self.inputs = self.draw(nodes)
        self.leaves = {
            name: parameter.detach()
            for name, parameter in self.module.named_parameters()
        }
        first = self.inputs[row.names[0]]
        if first.is_floating_point():
            self.leaves["input"] = first
            self.point = "input"
        else:
            self.point = min(self.leaves, key=lambda name: self.leaves[name].numel())
        # As PyG's, it runs without gradients.
        self.differentiable = not isinstance(self.module, dm.LabelPropagation)

    def draw(self, nodes: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(nodes)
        if "mask" in self.row.names:
            tokens = torch.randint(9, (2, nodes), generator=generator)
            return {
                "x": tokens,
                "mask": torch.rand(2, nodes, generator=generator) < 0.8,
            }
        drawn = graphs(nodes)
        # Some of the layers take symmetric edges alone.
        loops = drawn["edge_index"][0] == drawn["edge_index"][1]
        edges = drawn["edge_index"][:, ~loops]
        drawn["edge_index"] = torch.cat([edges, edges.flip(0)], 1)
        for name in ("edge_weight", "edge_attr"):
            drawn[name] = torch.cat(2 * [drawn[name][~loops]])
        drawn["x"] = drawn["x"][:, : getattr(self.module, "in_channels", 8)]
        drawn = tree_map(in_double, drawn)
        return {name: drawn[name] for name in self.row.names}

    def call(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """Return the output as a function of leaves; the others are what they were drawn as."""
        values = {**self.leaves, **leaves}
        first = values.pop("input", self.inputs[self.row.names[0]])
        others = dict(list(self.inputs.items())[1:])
        return functional_call(self.module, values, (first,), others)

    def at(self, value: Tensor) -> Tensor:
        """Return the output as a function of one leaf, the `point`."""
        return self.call({self.point: value})

    def loss(self, value: Tensor) -> Tensor:
        return weighted(self.at(value))

    @property
    def value(self) -> Tensor:
        return self.leaves[self.point]

    @property
    def direction(self) -> Tensor:
        generator = torch.Generator().manual_seed(17)
        return torch.randn(self.value.shape, generator=generator, dtype=torch.float64)

    def gradient(self, value: Tensor) -> Tensor:
        """Return the gradient of the loss as autograd gives it to everybody, zero where there is none."""
        leaf = value.clone().requires_grad_()
        loss = self.loss(leaf)
        if not loss.requires_grad:
            return torch.zeros_like(value)
        (slope,) = torch.autograd.grad(loss, leaf)
        return slope

    def slope(self) -> Tensor:
        """Return the derivative of the loss along the direction."""
        if self.differentiable:
            return (self.gradient(self.value) * self.direction).sum()
        step = 1e-4  # such models are linear
        ahead, behind = (
            self.loss(self.value + sign * step * self.direction) for sign in (1, -1)
        )
        return (ahead - behind) / (2 * step)


def same(got: Any, expected: Any, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    assert_close(got, expected, rtol=rtol, atol=atol)


def weighted(out: Tensor) -> Tensor:
    return (
        out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    ).sum()


def check_grad(subject: Subject) -> None:
    def loss(leaves: dict[str, Tensor]) -> Tensor:
        return weighted(subject.call(leaves))

    leaves = {
        name: leaf.clone().requires_grad_() for name, leaf in subject.leaves.items()
    }
    total = loss(leaves)
    expected: Sequence[Tensor | None] = [None] * len(leaves)
    if total.requires_grad:
        expected = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    got = grad(loss)(dict(subject.leaves))
    for (name, slope), by_autograd in zip(got.items(), expected, strict=True):
        other = torch.zeros_like(slope) if by_autograd is None else by_autograd
        assert_close(
            slope,
            other,
            rtol=1e-8,
            atol=1e-10,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def check_vjp(subject: Subject) -> None:
    loss, pull = vjp(subject.loss, subject.value)
    same(loss, subject.loss(subject.value))
    same(pull(torch.ones_like(loss))[0], subject.gradient(subject.value))


def check_jvp(subject: Subject) -> None:
    out, tangent = jvp(subject.loss, (subject.value,), (subject.direction,))
    same(out, subject.loss(subject.value))
    same(tangent, subject.slope(), rtol=1e-7)


def check_dual_numbers(subject: Subject) -> None:
    with dual_level():
        dual = subject.loss(make_dual(subject.value, subject.direction))
        same(unpack_dual(dual).tangent, subject.slope(), rtol=1e-7)


def check_linearize(subject: Subject) -> None:
    out, push = linearize(subject.loss, subject.value)
    same(out, subject.loss(subject.value))
    same(push(subject.direction), subject.slope(), rtol=1e-7)


def rows_of_jacobian(subject: Subject, jacobian: Tensor) -> Tensor:
    out = subject.at(subject.value)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype)
    return torch.tensordot(weights, jacobian.flatten(0, out.dim() - 1), 1)


def check_jacrev(subject: Subject) -> None:
    same(
        rows_of_jacobian(subject, jacrev(subject.at)(subject.value)),
        subject.gradient(subject.value),
        rtol=1e-8,
    )


def check_jacfwd(subject: Subject) -> None:
    got = rows_of_jacobian(subject, jacfwd(subject.at)(subject.value))
    same((got * subject.direction).sum(), subject.slope(), rtol=1e-7)
    if subject.differentiable:
        same(got, subject.gradient(subject.value), rtol=1e-8)


def check_vmap(subject: Subject) -> None:
    several = torch.stack(
        [subject.value, 0.5 * subject.value, subject.value + 0.1 * subject.direction]
    )
    same(
        vmap(subject.at)(several), torch.stack([subject.at(value) for value in several])
    )


def check_vmap_grad(subject: Subject) -> None:
    several = torch.stack([subject.value, 0.5 * subject.value])
    same(
        vmap(grad(subject.loss))(several),
        torch.stack([subject.gradient(value) for value in several]),
        rtol=1e-8,
    )


def check_hessian(subject: Subject) -> None:
    """Compare H d with a central difference of the gradient along d, at a point where no ReLU has its kink nearby."""
    direction = subject.direction / subject.direction.norm()
    step = 1e-5
    ahead, behind = (
        subject.gradient(subject.value + sign * step * direction) for sign in (1, -1)
    )
    expected = (ahead - behind) / (2 * step)
    curvature = (
        hessian(subject.loss)(subject.value).flatten(subject.value.dim()).flatten(0, -2)
    )
    got = (curvature @ direction.flatten()).view_as(expected)
    size = float(expected.abs().max()) + float(ahead.abs().max())
    assert_close(got, expected, rtol=1e-5, atol=1e-6 * size)


def check_checkpoint(subject: Subject) -> None:
    leaf = subject.value.clone().requires_grad_()
    out = checkpoint(subject.loss, leaf, use_reentrant=False)
    same(out, subject.loss(subject.value))
    if subject.differentiable:
        same(torch.autograd.grad(out, leaf)[0], subject.gradient(subject.value))


def check_compile(subject: Subject) -> None:
    torch.compiler.reset()
    module = subject.module
    compiled = torch.compile(module, backend="aot_eager")
    for nodes in (NODES, NODES + 4):
        first, *others = subject.draw(nodes).items()
        same(compiled(first[1], **dict(others)), module(first[1], **dict(others)))
    torch.compiler.reset()


def check_export(subject: Subject) -> None:
    sizes = {
        name: LENGTHS if "mask" in subject.row.names else SIZES[name]
        for name in subject.row.names
    }
    program = export(
        subject.module, (), subject.draw(12), dynamic_shapes=sizes, strict=False
    )
    for nodes in (12, NODES, 2):
        inputs = subject.draw(nodes)
        same(program.module()(**inputs), subject.module(**inputs))


TRANSFORMS: dict[str, Callable[[Subject], None]] = {
    "grad": check_grad,
    "vjp": check_vjp,
    "jvp": check_jvp,
    "dual numbers": check_dual_numbers,
    "linearize": check_linearize,
    "jacrev": check_jacrev,
    "jacfwd": check_jacfwd,
    "vmap": check_vmap,
    "vmap(grad)": check_vmap_grad,
    "hessian": check_hessian,
    "checkpoint": check_checkpoint,
    "compile": check_compile,
    "export": check_export,
}

NO_VALUES = "takes as many steps as its values need, and torch.export has no values"
OTHER_STEPS = "takes another number of steps for every entry of a vmap"
ITERATED = (
    "layer-certified-block-limit",
    "layer-certified-conv-limit",
    "model-certified-limit",
)

#: What mathematics or torch forbids: the sentence that says so, by row and transform.
REFUSED: dict[tuple[str, str], str] = {
    ("layer-certified-block-at-rest", "export"): NO_VALUES,
    **{(row, "export"): NO_VALUES for row in ITERATED},
    **{
        (row, transform): OTHER_STEPS
        for row in ITERATED
        for transform in ("vmap", "vmap(grad)")
    },
}

LONG = ("compile", "export", "hessian")
CELLS = [
    pytest.param(row, transform, marks=[pytest.mark.exhaustive] * (transform in LONG))
    for row in ROWS
    for transform in TRANSFORMS
]


@pytest.mark.unwatched
@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize(("row", "transform"), CELLS)
def test_a_transformed_call_is_the_plain_call(row, transform):
    subject = Subject(ROWS[row])
    sentence = REFUSED.get((row, transform))
    if sentence is None:
        TRANSFORMS[transform](subject)
        return
    with pytest.raises(Exception, match=re.escape(sentence)):
        TRANSFORMS[transform](subject)


KEPT = (
    "gcn",
    "gat-concat",
    "difformer-conv-tied",
    "sfi-conv",
    "certified-block",
    "appnp-limit",
)


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize("row", KEPT)
@pytest.mark.parametrize("transform", ["grad", "vmap", "hessian"])
def test_a_graph_keeps_nothing_of_a_transform(row, transform):
    """What a graph computes on first use may be used by later calls, in and outside of transforms."""
    subject = Subject(LAYERS[row])
    x = subject.inputs["x"]
    batch = graphs(NODES)["batch"]
    graph = dm.Graph(NODES, subject.inputs["edge_index"], batch=batch)

    def loss(state: Tensor) -> Tensor:
        return subject.module(state, graph).square().sum()

    transforms = {
        "grad": grad(loss),
        "vmap": lambda state: vmap(loss)(torch.stack([state, state])),
        "hessian": hessian(loss),
    }
    first = transforms[transform](x)
    loss(x.clone().requires_grad_()).backward()
    same(transforms[transform](x), first)


def test_every_refusal_is_on_the_page():
    page = " ".join(PAGE.read_text().split())
    for sentence in set(REFUSED.values()):
        assert sentence in page, f"docs/which-model.md does not say: {sentence}"


def public_modules(package: ModuleType) -> set[type]:
    exported = [getattr(package, name) for name in package.__all__]
    return {
        value
        for value in exported
        if inspect.isclass(value) and issubclass(value, nn.Module)
    }


def test_every_public_layer_and_model_has_a_row():
    listed = {
        type(part) for row in ROWS.values() for part in built(row.build).modules()
    }
    missing = public_modules(layers) | public_modules(models)
    # An encoder of positions has no graph, and a TermModule is the base of terms.
    missing -= listed | {LaplacianEncoder, layers.TermModule}
    assert not missing, f"add these to ROWS: {missing}"
