"""``released_state_dict``: load checkpoints of the released code of DIFFormer, NodeFormer and SGFormer."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor, nn

from diffusion_mp.checks import describe
from diffusion_mp.layers.pyg import Rule, check_state_dict, new_name
from diffusion_mp.models.difformer import DIFFormer
from diffusion_mp.models.nodeformer import NodeFormer
from diffusion_mp.models.sgformer import SGFormer

#: From names within a layer of this library to the released ones.
LAYER: tuple[Rule, ...] = (
    (r"\bdiffusivity\.(attention\.)?", ""),
    (r"\bgraph_term\.bias\b", "b"),
    (r"\bquery\b", "Wq"),
    (r"\bkey\b", "Wk"),
    (r"\bvalue\b", "Wv"),
    (r"\bmix\b", "Wo"),
)
STACK: tuple[Rule, ...] = (
    (r"^encoder\b", "fcs.0"),
    (r"^decoder\b", "fcs.1"),
    (r"^norms\b", "bns"),
)
NAMES: dict[type[nn.Module], tuple[Rule, ...]] = {
    DIFFormer: (*LAYER, *STACK),
    NodeFormer: (*LAYER, *STACK),
    SGFormer: (
        (r"^gnn\.encoder\b", "graph_conv.fcs.0"),
        (r"^gnn\.norms\.(\d+)\.module\b", r"graph_conv.bns.\1"),
        (r"^gnn\.convs\.(\d+)\.value\b", r"graph_conv.convs.\1.W"),
        (r"^gnn\.convs\.(\d+)\.bias\b", r"graph_conv.convs.\1.W.bias"),
        (r"^encoder\.0\b", "trans_conv.fcs.0"),
        (r"^encoder\.1\b", "trans_conv.bns.0"),
        (r"^conv\b", "trans_conv.convs.0"),
        (r"^norm\b", "trans_conv.bns.1"),
        (
            r"^further\.(\d+)\.0\b",
            lambda match: f"trans_conv.convs.{int(match[1]) + 1}",
        ),
        (r"^further\.(\d+)\.1\b", lambda match: f"trans_conv.bns.{int(match[1]) + 2}"),
        (r"^decoder\b", "fc"),
        *LAYER,
    ),
}
# Two steps, PyG's names to released names to ours, instead of a third table that would repeat both.
#: From the names of PyG's SGFormer to the released ones.
PYG: tuple[Rule, ...] = (
    (r"^(trans_conv)\.attns\.(\d+)\.([qkv])\b", r"\1.convs.\2.W\3"),
    (r"^(graph_conv\.convs\.\d+)\.lin\b", r"\1.W"),
    (r"^(graph_conv\.convs\.\d+)\.bias\b", r"\1.W.bias"),
)

#: The options of a model that add tensors, by the released names of these.
OPTIONS = {
    r"graph_conv\.": "gnn='residual'",
    r"W[qk]\.weight": "projection='separate'",
    r"Wv\.weight": "transform=True",
    r"W[qkv]\.bias": "qkv_bias=True",
    r"\bbns\.": "layer_norm=True",
    r"\bb$": "a relational_bias",
    r"^fcs?\b": "task='node'",
}
#: Buffers that the released code does not save: its NodeFormer draws features and noise at every call.
DRAWN = re.compile(r"\b(directions|noise_state)$")


def released_state_dict(
    model: nn.Module, released: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a state dict for ``model`` from one of released DIFFormer, NodeFormer or SGFormer, or of PyG's SGFormer.

    Options that leave no trace in tensors (τ, dropout, the kernel, …) have to be passed to the model; docs/released.md
    lists them. The released code does not save the random features of NodeFormer, so these keep the values of
    ``model``.

    Args:
        model: A :class:`DIFFormer`, :class:`NodeFormer` or :class:`SGFormer` with the sizes and options of the
            checkpoint.
        released: The checkpoint, ``torch.load(path, weights_only=True)``.

    Raises:
        TypeError: No code was released for the class of ``model``.
        ValueError: Names or shapes differ; the message names the option that is missing.

    Examples:
        >>> from torch_geometric.nn.models import SGFormer as PyGSGFormer
        >>> theirs = PyGSGFormer(4, 8, 3, trans_num_layers=1, gnn_num_layers=1)
        >>> model = SGFormer.like_pyg(4, 8, 3, trans_num_layers=1, gnn_num_layers=1)
        >>> model.load_state_dict(released_state_dict(model, theirs.state_dict()))
        <All keys matched successfully>
    """
    kind = next((kind for kind in NAMES if isinstance(model, kind)), None)
    if kind is None:
        raise TypeError(
            f"model must be one of {', '.join(kind.__name__ for kind in NAMES)}, whose code was released; got "
            f"{describe(model)}."
        )
    check_state_dict(released, "released")
    state = model.state_dict()
    drawn = {name: tensor for name, tensor in state.items() if DRAWN.search(name)}
    # Both sides are compared by the names of the released code, in which its messages and papers speak.
    ours = {new_name(name, NAMES[kind]): name for name in state if name not in drawn}
    theirs = {
        new_name(name, PYG if kind is SGFormer else ()): name for name in released
    }
    # First what has no counterpart: with another number of layers, the names say more than a shape.
    unknown = [key for name, key in theirs.items() if name not in ours]
    missing = [name for name in ours if name not in theirs]
    if unknown or missing:
        options = [
            option
            for pattern, option in OPTIONS.items()
            if any(re.search(pattern, name) for name in [*unknown, *missing])
        ]
        raise ValueError(
            f"{kind.__name__} and released differ: released alone has {unknown}, and the model alone {missing}, by the "
            f"names of the released code. Build the model with as many layers as released has, and with or without "
            f"{', '.join(options) or 'what these are of'}."
        )
    for name, parameter in ours.items():
        tensor = released[theirs[name]]
        if state[parameter].shape != tensor.shape:
            raise ValueError(
                f"released[{theirs[name]!r}] is {describe(tensor)}, but {parameter!r} of the model has shape "
                f"{list(state[parameter].shape)}. Build it with the channels, heads and hops of the checkpoint; jump "
                f"and aggregate say how many states the output layer reads."
            )
    return drawn | {
        parameter: released[theirs[name]] for name, parameter in ours.items()
    }
