"""``from_pyg``: weights that were learned by PyG's layers, in the names of ours."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.nn.dense import Linear

from diffusion_mp.diffusivities.base import ScaledDiffusivity, SumDiffusivity
from diffusion_mp.errors import check_kind
from diffusion_mp.layers.fixed import GATConv, GCNConv, GCNIIConv, GINConv, SGConv

#: What PyG calls a parameter, or with a dot at the end a module, and what we call it.
NAMES: dict[type[nn.Module], dict[str, str]] = {
    GCNConv: {"lin.weight": "value.weight"},
    SGConv: {"lin.weight": "value.weight", "lin.bias": "bias"},
    GINConv: {"eps": "diffusivity.terms.0.scale", "nn.": "mlp."},
    GATConv: {
        "lin.weight": "value.weight",
        "lin_src.weight": "value.weight",
        "att_src": "diffusivity.att_src",
        "att_dst": "diffusivity.att_dst",
        "att_edge": "diffusivity.att_edge",
        "lin_edge.weight": "diffusivity.edge.weight",
    },
    GCNIIConv: {"weight1": "weight"},
}


def from_pyg(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of PyG's layers as one that ``module`` loads, which then gives the same outputs.

    GCNConv, SGConv, GINConv, GATConv and GCNIIConv, PyG's GCN2Conv, are known, by themselves or within any module that
    has them under the names that PyG's had there, as :class:`DiffusionGNN` has those of PyG's ``GCN``, ``GAT`` and
    ``GIN`` (the last one without norm, and with a jk or as many hidden as output channels). What belongs to other
    modules keeps its name; propagation alone (``APPNP``) has no weights.

    Args:
        module: ours, built with the options that PyG's had.
        state: of PyG's.

    Raises:
        TypeError: no module, or no state dict.
        ValueError: weights that the layer has no place for: two matrices for the two ends of an edge (GAT between nodes
            of two kinds) or in a GCN2Conv, norms or other widths in the MLP of a GINConv, or another ε than that of one
            which does not learn it.

    Examples:
        >>> from torch_geometric import nn as pyg
        >>> theirs, ours = pyg.GCNConv(4, 8), GCNConv(4, 8)
        >>> ours.load_state_dict(from_pyg(ours, theirs.state_dict()))
        <All keys matched successfully>
    """
    check_kind(module, "module", nn.Module, "a module with layers of this library")
    check_kind(state, "state", Mapping, "a state dict, names with tensors")
    for name, value in state.items():
        check_kind(value, f"state[{name!r}]", Tensor, "a tensor")
    found = dict(state)
    for path, layer in module.named_modules():
        for kind, names in NAMES.items():
            if isinstance(layer, kind):
                _rename(found, f"{path}." if path else "", layer, names)
    return found


def _rename(state: dict[str, Tensor], prefix: str, layer: nn.Module, names: Mapping[str, str]) -> None:
    kind = type(layer).__name__
    receivers, senders = state.get(f"{prefix}lin_dst.weight"), state.get(f"{prefix}lin_src.weight")
    if receivers is not None and senders is not None:  # one matrix, which older versions wrote down twice
        if receivers.shape != senders.shape or not torch.equal(receivers, senders):
            raise ValueError(
                f"{kind} has one matrix for both ends of an edge; state has another, {prefix}lin_dst.weight."
            )
        del state[f"{prefix}lin_dst.weight"]
    if isinstance(layer, GCNIIConv) and f"{prefix}weight2" in state:
        raise ValueError(f"{kind} has one matrix for both states; state has a second, {prefix}weight2.")
    if isinstance(layer, GINConv) and isinstance(layer.mlp, nn.Sequential):
        _rename_mlp(state, f"{prefix}nn.", layer.mlp)
    if isinstance(layer, GINConv) and f"{prefix}eps" in state:
        eps = state.pop(f"{prefix}eps").reshape(())
        scale = _own_weight(layer)
        if isinstance(scale, Tensor):
            state[f"{prefix}eps"] = 1 + eps
        elif abs(float(eps) + 1 - scale) > 1e-6:
            raise ValueError(
                f"eps is {float(eps):g} in the state and {scale - 1:g} in the layer, which does not learn it. Build "
                f"GINConv(..., eps={float(eps):g}), or with train_eps=True."
            )
    for key in [key for key in state if key.startswith(prefix)]:
        for theirs, ours in names.items():
            rest = key.removeprefix(prefix)
            if rest == theirs or (theirs.endswith(".") and rest.startswith(theirs)):
                state[f"{prefix}{ours}{rest.removeprefix(theirs)}"] = state.pop(key)


def _rename_mlp(state: dict[str, Tensor], prefix: str, mlp: nn.Sequential) -> None:
    """The linear maps of an MLP of PyG's, which is inside the layers of its model GIN, by their places in ours."""
    keys = [key for key in state if key.startswith(f"{prefix}lins.")]
    if keys and any(key.startswith(f"{prefix}norms.") for key in state):
        raise ValueError(
            f"{prefix}norms are norms inside the MLP of a layer, for which DiffusionGNN has no place. Build PyG's GIN "
            f"without norm, or GINConv(in_channels, mlp) with an MLP of PyG's."
        )
    linear = [place for place, part in enumerate(mlp) if isinstance(part, (nn.Linear, Linear))]
    for key in keys:
        number, name = key.removeprefix(f"{prefix}lins.").split(".")
        ours = f"{linear[int(number)]}.{name}" if int(number) < len(linear) else None
        here = mlp.get_parameter(ours) if ours in mlp.state_dict() else None
        if here is None or not (is_lazy(here) or here.shape == state[key].shape):
            raise ValueError(
                f"{key} is {list(state[key].shape)}, and in the layer here "
                f"{'there is none' if here is None else list(here.shape)}. The last MLP of PyG's GIN has the widths "
                f"hidden, out, out; that of DiffusionGNN hidden, hidden, out. They agree where the model has a jk, or "
                f"as many hidden_channels as out_channels."
            )
        state[f"{prefix}{ours}"] = state.pop(key)


def _own_weight(layer: GINConv) -> Tensor | float:
    """1 + ε."""
    assert isinstance(layer.diffusivity, SumDiffusivity)
    own = layer.diffusivity.terms[0]
    assert isinstance(own, ScaledDiffusivity)
    scale = own.scale
    assert isinstance(scale, (Tensor, float))
    return scale
