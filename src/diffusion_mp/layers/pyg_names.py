"""The names that only PyG's classes have: taken where they mean the same, else refused with the way out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, signature
from typing import Any

from torch import fx

from diffusion_mp.errors import check_flags

#: Options with values that say what every layer does anyway.
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

#: What to do instead of giving an option of PyG's.
OPTIONS: dict[str, str] = {
    "act": "Put the activation around the layer; DiffusionGNN takes act.",
    "add_self_loops": "A diffusivity of edges takes them, self_loops='remaining' (True) or 'keep' (False), and can be "
    "passed where there is a diffusivity=.",
    "aggr": "A coupling adds up what its entries weigh; the mean is DiffusionConv with AdjacencyDiffusivity('row').",
    "cached": "What is found out about a graph is kept with it, for as long as it is the same; leave it out.",
    "concat": "There is one head.",
    "decomposed_layers": "Leave it out.",
    "dropout": "Put torch.nn.functional.dropout around the layer.",
    "edge_dim": "GATConv, GatedGCN, GPS and SFiFormer read features of edges.",
    "fill_value": "A self-loop has the mean of the features of the edges that reach its node; for others pass the "
    "loops with your edges, and self_loops='keep'.",
    "flow": "Edges point from the sender to the receiver; the other way round pass edge_index.flip(0).",
    "heads": "There is one head; GATConv has several.",
    "improved": "For loops of weight 2 pass what torch_geometric.utils.add_remaining_self_loops gives for (edge_index, "
    "edge_weight, 2.0) to a layer with self_loops='keep'.",
    "jk": "DiffusionGNN takes jk.",
    "nn": "It is called mlp, and stands after in_channels: GINConv(in_channels, mlp).",
    "node_dim": "Nodes are the rows of x; transpose it.",
    "norm": "Put the norm around the layer; DiffusionGNN takes norm.",
    "normalize": "Without degrees a coupling is AdjacencyDiffusivity('sum'), to be passed where there is a "
    "diffusivity=, as in DiffusionConv.",
    "residual": "Add the state yourself, x + layer(x, edge_index); GATConv and MultiHeadConv take residual.",
    "self_loops": "A diffusivity of edges takes self_loops, and can be passed where there is a diffusivity=.",
    "shared_weights": "One matrix serves the propagated and the initial state.",
}

#: What to do instead of giving an input of PyG's.
INPUTS: dict[str, str] = {
    "batch_size": "It is batch that says which graph a node belongs to.",
    "edge_attr": "GATConv(edge_dim=…), DiffusionGNN(conv='gat', edge_dim=…), GatedGCN, GPS and SFiFormer read features "
    "of edges; one number an edge is its edge_weight.",
    "num_sampled_edges_per_hop": "Nothing is trimmed; leave it out.",
    "num_sampled_nodes_per_hop": "Nothing is trimmed; leave it out.",
    "post_step": "Labels are clamped to [0, 1] after every step.",
    "ptr": "Pass Graph(num_nodes, edge_index, ptr=ptr) in the place of edge_index.",
    "return_attention_weights": "With return_coupling=True the operator S comes too: S.at(edge_index) has its entries "
    "at these edges, S.to_dense() all of them.",
    "size": "Pass the states of both ends as the pair (x_src, x_dst), which says the sizes, to GINConv or GATConv.",
    "x_0": "It is called source, and comes by name: layer(x, edge_index, source=x_0).",
}


class KnowsPyGNames:
    """A class whose constructor, and those of its subclasses, understand the options of PyG's classes."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = _understanding(cls.__init__)  # type: ignore[method-assign]


class UnknownOptionError(TypeError):
    """An option that a class does not take, by the name it has here."""

    def __init__(self, kind: type, name: str, given: Mapping[str, Any]) -> None:
        self.name = name
        typed = "add_self_loops" if name == "self_loops" and name not in given else name
        super().__init__(f"{kind.__name__} takes no {typed}. {OPTIONS.get(typed) or _taken(kind)}")


def _understanding(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def __init__(self: object, *args: Any, **options: Any) -> None:
        try:
            init(self, *args, **_ours(options))
        except UnknownOptionError as error:  # of a layer that was to be built with these options
            raise UnknownOptionError(type(self), error.name, options) from None
        except TypeError as error:
            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if unknown is None:
                raise
            raise UnknownOptionError(type(self), unknown[1], options) from None

    return __init__


def _ours(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options in our names, without those that say what every layer does anyway."""
    found = {
        name: value
        for name, value in options.items()
        if name not in AS_ALWAYS or not any(value is same or value == same for same in AS_ALWAYS[name])
    }
    loops = found.pop("add_self_loops", None)
    if loops is not None:
        check_flags(add_self_loops=loops)
        if "self_loops" in found:
            raise ValueError("add_self_loops and self_loops say the same thing; pass one of them.")
        found["self_loops"] = "remaining" if loops else "keep"
    return found


def _taken(kind: type) -> str:
    parameters = list(signature(kind).parameters.values())
    further = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
    names = [parameter.name for parameter in parameters if parameter.kind is not Parameter.VAR_KEYWORD]
    return f"It takes {', '.join(names)}{' and the options its documentation names' if further else ''}."


def refuse_inputs(module: object, inputs: Mapping[str, Any]) -> None:
    """Raise for inputs that a call does not take; PyG's own may be ``None``."""
    for name, value in inputs.items():
        if name not in INPUTS or value is not None:
            way_out = INPUTS.get(name, f"It takes {', '.join(signature(module.forward).parameters)}.")  # type: ignore[attr-defined]
            raise TypeError(f"a call of {type(module).__name__} takes no {name}. {way_out}")


def refuse_proxy(module: object, x: object) -> None:
    """Raise where torch.fx traces a model, as PyG's ``to_hetero`` does."""
    if isinstance(x, fx.Proxy):
        raise TypeError(
            f"{type(module).__name__} looks at its input, which torch.fx can not trace, so PyG's to_hetero can not "
            f"rewrite it. Pass data.to_homogeneous(); or put layers that take a pair of states into PyG's HeteroConv, "
            f"such as GATConv(…, self_loops='keep')."
        )
