"""Interoperation with PyG: PyG's names of options and inputs, its weights, and its pairs of states."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import wraps
from inspect import Parameter, signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from diffusion_mp.checks import (
    check_flags,
    check_integer_pairs,
    check_kind,
    check_range,
    check_state,
    checked,
    describe,
    values_to_check,
)
from diffusion_mp.diffusivities import (
    AdjacencyDiffusivity,
    Diffusivity,
    IdentityDiffusivity,
)
from diffusion_mp.diffusivities.base import ScaledDiffusivity, SumDiffusivity

#: Options of PyG's classes with the values that describe what every layer here does; they are dropped, so that code
#: written for PyG runs.
AS_ALWAYS: dict[str, tuple[object, ...]] = {
    "aggr": ("add", "sum"),
    "aggr_kwargs": (None,),
    "cached": (True, False),
    "decomposed_layers": (1,),
    "fill_value": ("mean",),
    "flow": ("source_to_target",),
    "improved": (False,),
    "node_dim": (-2, 0),
    "shared_weights": (True,),
}

#: The way out for an option of PyG's that is refused.
OPTIONS: dict[str, str] = {
    "add_self_loops": "A diffusivity of edges takes them, self_loops='remaining' (True) or 'keep' (False), and can be "
    "passed where there is a diffusivity=.",
    "aggr": "A coupling adds up what its entries weigh; the mean is DiffusionConv with AdjacencyDiffusivity('row').",
    "edge_dim": "GATConv, GatedGCN, GPS, SFiFormer and CertifiedTransformer read features of edges.",
    "fill_value": "A self-loop has the mean of the features of the edges that reach its node; for others pass the "
    "loops with your edges, and self_loops='keep'.",
    "flow": "Edges point from the sender to the receiver; the other way round pass edge_index.flip(0).",
    "improved": "For loops of weight 2 pass what torch_geometric.utils.add_remaining_self_loops gives for (edge_index, "
    "edge_weight, 2.0) to a layer with self_loops='keep'.",
    "nn": "It is called mlp, and stands after in_channels: GINConv(in_channels, mlp).",
    "node_dim": "Nodes are the rows of x; transpose it.",
    "normalize": "Without degrees a coupling is AdjacencyDiffusivity('sum'), to be passed where there is a "
    "diffusivity=, as in DiffusionConv.",
    "self_loops": "A diffusivity of edges takes self_loops, and can be passed where there is a diffusivity=.",
}

#: The way out for an input of PyG's that is refused.
INPUTS: dict[str, str] = {
    "batch_size": "The number of graphs is that of batch. If the last graphs are empty, which batch does not show, "
    "pass Graph.from_data(batch) in the place of edge_index: layer(batch.x, Graph.from_data(batch)).",
    "edge_attr": "GATConv, DiffusionGNN(conv='gat'), CertifiedTransformer, GPS and SFiFormer that were built with "
    "edge_dim, and GatedGCN, read features of edges; one number an edge is its edge_weight.",
    "edge_type": "Models built with edge_dim=num_types, such as CertifiedTransformer, take the types as "
    "edge_attr=one_hot(edge_type, num_types).float().",
    **dict.fromkeys(
        ("num_sampled_edges_per_hop", "num_sampled_nodes_per_hop"),
        "Nothing is trimmed; leave it out.",
    ),
    "post_step": "Labels are clamped to [0, 1] after every step.",
    "ptr": "Pass Graph(num_nodes, edge_index, ptr=ptr) in the place of edge_index.",
    "return_attention_weights": "With return_coupling=True the operator S comes too: S.at(edge_index) has its entries "
    "at these edges, S.to_dense() all of them.",
    "size": "Pass the states of both ends as the pair (x_src, x_dst), which says the sizes, to GINConv or GATConv.",
    "x_0": "It is called source, and comes by name: layer(x, edge_index, source=x_0).",
}

Rule = tuple[str, str | Callable[[re.Match[str]], str]]
"""A regular expression, and what replaces its match: a template or a function of the match, as for ``re.sub``."""


def new_name(name: str, rules: Iterable[Rule]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


class KnowsPyGNames:
    """Mixin whose subclasses take the options of PyG's classes, or refuse them and say what to use instead."""

    pyg_weights: ClassVar[Sequence[Rule]] = ()
    """Rules from PyG's names of parameters to the names here."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Around the constructors, so that no class has to think of names that are not its own.
        if "__init__" in vars(cls):
            cls.__init__ = _translated(cls.__init__)  # type: ignore[method-assign]

    def convert_from_pyg(
        self, state: Mapping[str, Tensor], prefix: str
    ) -> dict[str, Tensor]:
        """Rename the parameters of PyG's layer at ``prefix``; raise if two different tensors would get one name."""
        renamed: dict[str, Tensor] = {}
        for key, value in state.items():
            name = new_name(key, self.pyg_weights)
            first = renamed.setdefault(name, value)
            if first is not value and not torch.equal(first, value):
                others = [
                    other
                    for other in state
                    if new_name(other, self.pyg_weights) == name
                ]
                raise ValueError(
                    f"{type(self).__name__} has one matrix, {name}, where the state has {len(others)} that differ: "
                    f"{' and '.join(prefix + other for other in others)}."
                )
        return renamed


def _translated(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that takes PyG's names, and whose errors say what to use in place of an unknown one."""
    parameters = signature(init).parameters

    @wraps(init)
    def __init__(self: object, *args: Any, **options: Any) -> None:
        ours = _ours(options, parameters)
        try:
            init(self, *args, **ours)
        except TypeError as error:
            # Python's own sentence names the option; the options of all base classes are not known here.
            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if unknown is None or unknown[1] not in ours:
                raise
            name = unknown[1]
            kind = type(self)
            raise TypeError(
                f"{kind.__name__} takes no {name}. {OPTIONS.get(name) or _taken(kind)}"
            ) from None

    return __init__


def _ours(options: Mapping[str, Any], parameters: Container[str]) -> dict[str, Any]:
    """Return the options by their names here, without those in `AS_ALWAYS`; names in ``parameters`` stay."""
    # A subclass may have an option of its own with a name of PyG's.
    ours = {
        name: value
        for name, value in options.items()
        if name in parameters or value not in AS_ALWAYS.get(name, ())
    }
    if "add_self_loops" in parameters or ours.get("add_self_loops") is None:
        return ours
    # PyG's layers give every node one loop, which here is "remaining".
    loops = ours.pop("add_self_loops")
    check_flags(add_self_loops=loops)
    if "self_loops" in ours:
        raise ValueError(
            "add_self_loops and self_loops say the same thing; pass one of them."
        )
    ours["self_loops"] = "remaining" if loops else "keep"
    return ours


def _taken(function: Callable[..., Any]) -> str:
    parameters = signature(function).parameters.values()
    names = [part.name for part in parameters if part.kind is not Parameter.VAR_KEYWORD]
    # With ``**options`` the list is not complete.
    if len(names) < len(parameters):
        return f"It takes {', '.join(names)} and the options its documentation names."
    return f"It takes {', '.join(names)}."


def refuse_inputs(module: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raise for inputs that a call does not take; inputs of PyG's classes may be ``None``."""
    for name, value in inputs.items():
        # Code written for PyG passes None for inputs that it does not have.
        if name in INPUTS and value is None:
            continue
        # The class can read features of edges, and this object was built without.
        kind = type(module).__name__
        if name == "edge_attr" and hasattr(module, "edge_dim"):
            kind += " built without edge_dim"
        way_out = INPUTS.get(name) or _taken(module.forward)
        raise TypeError(f"a call of {kind} takes no {name}. {way_out}")


def check_state_dict(state: Mapping[str, Tensor], name: str) -> None:
    what = "a dict of tensors, as torch.load(path, weights_only=True) gives it"
    check_kind(state, name, Mapping, what)
    for key, value in state.items():
        check_kind(key, f"every key of {name}", str, "the name of a tensor")
        check_kind(value, f"{name}[{key!r}]", Tensor, "a tensor")


@checked
def from_pyg(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a state dict of PyG's layers to one that ``module`` loads, with the same outputs.

    GCNConv, SGConv, GINConv, GATConv and GCNIIConv (PyG's GCN2Conv) are converted, alone or inside a module that has
    them under the same names as PyG's module. :class:`DiffusionGNN` has the names of PyG's ``GCN``, ``GAT`` and ``GIN``
    (``GIN`` without norm, and with a jk or equal numbers of hidden and output channels). Other names are kept.

    Args:
        module: Module of this library, built with the same options as PyG's module.
        state: State dict of PyG's module.

    Raises:
        ValueError: The state has weights for which the layer has no parameter, such as two matrices for the two ends of
            an edge.

    Examples:
        >>> from torch_geometric import nn as pyg
        >>> theirs, ours = pyg.GCNConv(4, 8), GCNConv(4, 8)
        >>> ours.load_state_dict(from_pyg(ours, theirs.state_dict()))
        <All keys matched successfully>
    """
    check_state_dict(state, "state")
    # Layer by layer, since names in a module of the user must stay.
    converted = dict(state)
    for path, layer in module.named_modules():
        if not isinstance(layer, KnowsPyGNames):
            continue
        prefix = f"{path}." if path else ""
        keys = [key for key in converted if key.startswith(prefix)]
        theirs = {key.removeprefix(prefix): converted.pop(key) for key in keys}
        for key, value in layer.convert_from_pyg(theirs, prefix).items():
            converted[prefix + key] = value
    return converted


def between(
    layer: Any,
    forward: Callable[..., Any],
    x: Sequence[Any],
    edge_index: Any,
    edge_weight: Any,
    **inputs: Any,
) -> Any:
    """Call ``forward`` of a layer on the pair x = (x_src, x_dst), and return the rows of x_dst.

    Edges lead from the first to the second.
    """
    kind = type(layer).__name__
    if len(x) != 2:
        raise TypeError(
            f"x must be a tensor [num_nodes, channels], or the pair (x_src, x_dst); got {describe(x)}."
        )
    # Senders of one kind receive nothing: a second step would spread what they do not have.
    if layer.steps > 1 or not _couples_edges_alone(layer.diffusivity):
        raise ValueError(
            f"x is the pair (x_src, x_dst) of nodes of two kinds, and {kind} couples more than their edges: all pairs, "
            f"added self-loops, degrees of both ends, or more than one step. Pass one state, "
            f"data.to_homogeneous(), or take GINConv, GATConv(self_loops='keep') or AdjacencyDiffusivity('row')."
        )
    for name in ("batch", "source", "previous"):
        if inputs.pop(name) is not None:
            raise ValueError(
                f"{name} goes with nodes of one kind; {kind} got it beside the pair (x_src, x_dst)."
            )
    senders, receivers = x
    channels = layer.in_channels
    if channels == -1:
        channels = None
    check_state(senders, "x_src", channels)
    check_state(receivers, "x_dst", senders.size(1))
    what = "a tensor [2, num_edges] where x is the pair (x_src, x_dst)"
    check_kind(edge_index, "edge_index", Tensor, what)
    check_integer_pairs(edge_index, "edge_index")
    # Here, since a receiver numbered too high would be a sender of the joined state.
    if values_to_check():
        check_range(edge_index[0], "edge_index[0]", senders.size(0))
        check_range(edge_index[1], "edge_index[1]", receivers.size(0))
    # A layer couples the rows of one state, so both kinds are numbered in one run: senders first, then receivers.
    first = senders.size(0)
    edges = torch.stack([edge_index[0].long(), edge_index[1].long() + first])
    rows = torch.cat([senders, receivers])
    # Weights and features of edges need no renumbering: the edges keep their order.
    out = forward(rows, edges, edge_weight, **inputs)
    if isinstance(out, Tensor):
        return out[first:]
    out, coupling = out
    return out[first:], coupling


def _couples_edges_alone(diffusivity: Diffusivity) -> bool:
    """Return whether the coupling has entries at observed edges alone, divided by degrees of receivers at most.

    Only such a coupling makes sense between nodes of two kinds.
    """
    # These add no edges and divide by no degrees.
    harmless = (IdentityDiffusivity, SumDiffusivity, ScaledDiffusivity)
    for part in diffusivity.modules():
        if not isinstance(part, Diffusivity) or isinstance(part, harmless):
            continue
        if not part.needs_graph or part.depends_on not in ("nothing", "edges"):
            return False
        if isinstance(part, AdjacencyDiffusivity) and part.normalization == "sym":
            return False
        # A loop would join a sender and a receiver of the same number.
        if getattr(part, "self_loops", None) != "keep":
            return False
    return True
