"""Features [N, H, F] of receivers and senders: checks, inner products, and functions of distances as such products."""

from __future__ import annotations

from typing import NoReturn

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.errors import describe
from diffusion_mp.graph import Graph
from diffusion_mp.graph.cache import values_only
from diffusion_mp.graph.ops import graph_of, mean_rows, members
from diffusion_mp.kernels.precision import unit_vectors
from diffusion_mp.kernels.spmm import sddmm
from diffusion_mp.runtime.torch_private import differentiated_inside

#: The largest a·½‖x − c‖² whose rounding in single precision leaves e^{−a·½z²} five digits.
RESOLVED = 64.0


def heads_of(v: Tensor, *features: Tensor) -> tuple[Tensor, ...]:
    """Expand the features [N, H, F] to the heads of the values."""
    heads = v.size(1)
    return features if features[0].size(1) == heads else tuple(t.expand(-1, heads, -1) for t in features)


def fill_across(pairs: Float[Tensor, "E H"], edge_index: Tensor, ptr: Tensor | None, fill: float) -> Tensor:
    """Numbers of listed pairs [2, E], with ``fill`` where source and target lie in different graphs."""
    if ptr is None:
        return pairs
    return pairs.masked_fill((graph_of(ptr, edge_index[1]) != graph_of(ptr, edge_index[0])).unsqueeze(1), fill)


def fill_blocks(pairs: Float[Tensor, "H R C"], ptr: Tensor | None, fill: float) -> Float[Tensor, "H R C"]:
    """Numbers of all pairs, with ``fill`` where their nodes lie in different graphs."""
    if ptr is None:
        return pairs
    member, _ = members(ptr, pairs.size(1), pairs.device)
    return pairs.masked_fill(member[:, None] != member[None, :], fill)


def listed_products(query: Tensor, key: Tensor, edge_index: Tensor, ptr: Tensor | None, across: float) -> Tensor:
    """q_i·k_j of listed pairs, [E, H] with j = ``edge_index[0]``, i = ``edge_index[1]``; ``across`` between graphs."""
    # Between graphs nothing bounds a product, so it is replaced before an exponential: ∞ · 0 is NaN.
    products = sddmm(Graph(query.size(0), edge_index, validate=False).pattern, query, key)
    return fill_across(products, edge_index, ptr, across)


def all_products(query: Tensor, key: Tensor, ptr: Tensor | None, across: float) -> Float[Tensor, "H N N"]:
    """q_i·k_j of all pairs, ``across`` between graphs."""
    return fill_blocks(torch.einsum("ihf,jhf->hij", query, key), ptr, across)


def unit_rows(q: Float[Tensor, "N H F"], k: Float[Tensor, "N H F"]) -> tuple[Tensor, Tensor]:
    """Both with every nonzero vector divided by its norm; one object if q is k."""
    unit = unit_vectors(q)
    return unit, unit if k is q else unit_vectors(k)


def _refuse(features: object, name: str) -> NoReturn:
    raise ValueError(f"{name} must be a tensor [num_nodes, heads, features]; got {describe(features)}.")


def with_constant(features: Float[Tensor, "N H F"], constant: float) -> Float[Tensor, "N H G"]:
    """Append a constant feature c, which adds c·c′ to every inner product.

    Examples:
        >>> torch.allclose((with_constant(q, 1.0) * with_constant(k, 1.0)).sum(2), (q * k).sum(2) + 1)
        True
    """
    if not isinstance(features, Tensor) or features.dim() != 3:
        _refuse(features, "features")
    return torch.cat([features, features.new_full((*features.shape[:2], 1), constant)], dim=2)


def at_least_zero(z2: Tensor) -> Tensor:
    """Return squared distances without what rounding takes below zero.

    The derivative at zero is 1, since that of δ there is f(0). ``clamp`` has it up to PyTorch 2.13; from 2.14 on its
    derivative at the bound is 0.
    """
    if not (z2.requires_grad or differentiated_inside()):
        return z2.clamp(min=0)  # one pass over the tiles of a product in place of two
    return torch.where(z2 < 0, 0.0, z2)


def measured_from(
    x: Float[Tensor, "N H D"], y: Float[Tensor, "N H D"], ptr: Tensor | None = None, centre: Tensor | None = None,
    sharpness: float | Tensor | None = None,
) -> tuple[Float[Tensor, "N H D"], Float[Tensor, "N H D"]]:  # fmt: skip
    """x − c and y − c in at least float32, one object if x is y; c is ``centre`` or the mean of y in its graph.

    A function of ‖x_i‖² + ‖y_j‖² − 2x_i·y_j does not depend on c, but its rounding grows with the squares. The result
    is in double precision if single precision does not resolve e^{−a·½z²}, where a is ``sharpness``; not under
    torch.compile and other transformations, which have no values.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    point = mean_rows(y.to(dtype), ptr) if centre is None else centre
    first = x.to(dtype) - point.to(dtype)
    second = first if y is x else y.to(dtype) - point.to(dtype)
    if sharpness is None or resolved(sharpness, *(-0.5 * z.detach().square().sum(2) for z in {first, second})):
        return first, second
    wide = x.double()
    return measured_from(wide, wide if y is x else y.double(), ptr, point)


def resolved(sharpness: float | Tensor, *halves: Tensor) -> bool:
    """Whether the dtype resolves e^{−a·½z²} of vectors with these −½‖x‖²; ``True`` where there are no values."""
    if halves[0].dtype == torch.float64 or not (halves[0].numel() and values_only()) or halves[0].is_meta:
        return True
    return not bool(sharpness * max(-half.detach().min() for half in halves) > RESOLVED)


def distance_features(
    x: Float[Tensor, "N H D"], y: Float[Tensor, "N H D"] | None = None, ptr: Tensor | None = None,
    *, centre: Tensor | None = None, sharpness: float | Tensor | None = None,
) -> tuple[Float[Tensor, "N H F"], Float[Tensor, "N H F"]]:  # fmt: skip
    r"""Return q = [x, −½‖x‖², 1] and k = [y, 1, −½‖y‖²], with q_i·k_j = −½‖x_i − y_j‖² (y = x by default).

    The result is in at least float32. A penalty's f(‖x_i − x_j‖²) is thus a score of an inner product, for any norm;
    the DIFFormer-s score 2 − ½z² stays low-rank. (For unit vectors only it is 1 + q_i·k_j; D8 of docs/errata.md.)

    Args:
        x, y, ptr: vectors of receivers and senders; row boundaries of a ragged batch, ``None`` for one graph.
        centre: points [1 or N, H, D] from which vectors are measured, by default the mean of y in every graph.
        sharpness: a, where e^{−a·½z²} must be accurate: features are in double precision if single does not resolve it.

    Examples:
        >>> query, key = distance_features(q)
        >>> torch.allclose((query[0] * key[1]).sum(1), -(q[0] - q[1]).square().sum(1) / 2, atol=1e-5)
        True
    """
    if not isinstance(x, Tensor) or x.dim() != 3:
        _refuse(x, "x")
    if y is not None and y is not x and (not isinstance(y, Tensor) or y.shape != x.shape):
        raise ValueError(f"x and y must have one shape; got {describe(x)} and {describe(y)}.")
    y = x if y is None else y
    first, second = measured_from(x, y, ptr, centre)
    first_half = -0.5 * first.square().sum(2, keepdim=True)
    second_half = first_half if second is first else -0.5 * second.square().sum(2, keepdim=True)
    if sharpness is not None and not resolved(sharpness, first_half, second_half):
        return distance_features(x.double(), None if y is x else y.double(), ptr, centre=centre)
    one = torch.ones_like(first_half)
    return torch.cat([first, first_half, one], dim=2), torch.cat([second, one, second_half], dim=2)
