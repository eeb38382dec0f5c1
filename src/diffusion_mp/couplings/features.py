"""Features [N, H, F] of receivers and senders: checks, inner products, and distances as inner products."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from diffusion_mp.checks import check_device, check_tensor, describe
from diffusion_mp.couplings.base import PROMISES, Coupling
from diffusion_mp.couplings.shapes import Features, Values
from diffusion_mp.graph import Graph
from diffusion_mp.graph.ops import detached_mean_rows, graph_of, members
from diffusion_mp.kernels.spmm import sddmm
from diffusion_mp.runtime.cache import cached_property, values_only
from diffusion_mp.runtime.precision import unit_vectors, wide_dtype
from diffusion_mp.runtime.torch_private import differentiated_inside

#: The largest a·½‖x − c‖² whose rounding in single precision leaves e^{−a·½z²} five digits.
RESOLVED = 64.0


def check_features(query: Tensor, key: Tensor, prefix: str = "") -> None:
    """Raise unless query and key are both [N, H, F], have one dtype and lie on one device."""
    shape = "[num_nodes, heads, features]"
    checked = f"{prefix}query and {prefix}key"
    check_tensor(query, f"{prefix}query", shape)
    check_tensor(key, f"{prefix}key", shape)
    if query.dim() != 3 or query.shape != key.shape:
        raise ValueError(
            f"{checked} must both be {shape} of one shape; got {describe(query)} and {describe(key)}."
        )
    if query.dtype != key.dtype:
        raise TypeError(
            f"{checked} must have one dtype; got {query.dtype} and {key.dtype}."
        )
    check_device(key, f"{prefix}key", query.device, f"{prefix}query")


class FeatureCoupling(Coupling):
    """Base of couplings whose entries are functions of features q_i and k_j.

    Args:
        query: features q of the receivers [N, H, F].
        key: features k of the senders [N, H, F].
        ptr: row boundaries [B+1] of a ragged batch, on the CPU (``Graph.segments``). ``None`` is one graph.
        promises: the promises of `Coupling`, and ``mutual``: entries before a normalisation of the rows are symmetric,
            as where a state attends to itself.
    """

    parts: ClassVar[tuple[str, ...]] = ("query", "key")
    promises = (*PROMISES, "mutual")
    mutual = False

    def __init__(
        self,
        query: Features,
        key: Features,
        ptr: Tensor | None = None,
        *,
        _checked: bool | None = False,
        **promises: bool | None,
    ) -> None:
        if not _checked:
            check_features(query, key)
        nodes, heads, _ = query.shape
        super().__init__(nodes, heads, query, ptr, _checked=_checked, **promises)
        self.query = query
        self.key = key

    @cached_property
    def symmetric(self) -> bool:
        return self.mutual and not self.row_stochastic


def heads_of(v: Tensor, *features: Tensor) -> tuple[Tensor, ...]:
    """Expand features [N, H, F] to the number of heads of the values."""
    heads = v.size(1)
    if features[0].size(1) == heads:
        return features
    return tuple(t.expand(-1, heads, -1) for t in features)


def fill_across(
    pairs: Float[Tensor, "E H"], edge_index: Tensor, ptr: Tensor | None, fill: float
) -> Tensor:
    """Return numbers of listed pairs [2, E], with ``fill`` where source and target lie in different graphs."""
    if ptr is None:
        return pairs
    source, target = graph_of(ptr, edge_index)
    return pairs.masked_fill((source != target).unsqueeze(1), fill)


def fill_blocks(
    pairs: Float[Tensor, "H R C"], ptr: Tensor | None, fill: float
) -> Float[Tensor, "H R C"]:
    """Return numbers of all pairs, with ``fill`` where the two nodes lie in different graphs."""
    if ptr is None:
        return pairs
    # All pairs were computed, and those between graphs are overwritten: a product of zero and NaN is NaN.
    member, _ = members(ptr, pairs.size(1), pairs.device)
    return pairs.masked_fill(member[:, None] != member[None, :], fill)


def listed_products(
    query: Tensor, key: Tensor, edge_index: Tensor, ptr: Tensor | None, across: float
) -> Tensor:
    """Return q_i·k_j [E, H] of listed pairs j → i, with ``across`` where they lie in different graphs."""
    # Nothing bounds a product between graphs. It is replaced before an exponential, since ∞ · 0 is NaN.
    products = sddmm(
        # `at` has checked the pairs.
        Graph(query.size(0), edge_index, validate=False).pattern,
        query,
        key,
    )
    return fill_across(products, edge_index, ptr, across)


def unit_rows(q: Features, k: Features | None = None) -> tuple[Tensor, Tensor]:
    """Divide every nonzero vector of q and k by its norm; one object twice if k is ``None``, which stands for q."""
    # One object for both roles, by which kernels compute its norms once.
    unit = unit_vectors(q)
    return unit, unit if k is None else unit_vectors(k)


def _check_rows(features: object, name: str) -> None:
    if not isinstance(features, Tensor) or features.dim() != 3:
        raise ValueError(
            f"{name} must be a tensor [num_nodes, heads, features]; got {describe(features)}."
        )


def with_constant(features: Features, constant: float) -> Float[Tensor, "N H G"]:
    """Append a constant feature to every vector.

    If queries get the constant c and keys the constant c′, every inner product grows by c·c′.

    Args:
        features: features [N, H, F] of queries or of keys.
        constant: the constant c.

    Returns:
        Features [N, H, F + 1].

    Examples:
        >>> torch.allclose((with_constant(q, 1.0) * with_constant(k, 1.0)).sum(2), (q * k).sum(2) + 1)
        True
    """
    _check_rows(features, "features")
    return pad(features, (0, 1), value=constant)


def at_least_zero(z2: Tensor) -> Tensor:
    """Return squared distances, with zero in place of values that rounding made negative.

    The derivative at zero is 1, since the derivative of δ there is f(0). ``clamp`` has this derivative up to PyTorch
    2.13. From PyTorch 2.14 on, its derivative at the bound is 0.
    """
    if not (z2.requires_grad or differentiated_inside()):
        return z2.clamp(min=0)  # one pass over the tiles of a product instead of two
    return torch.where(z2 < 0, 0.0, z2)


def measured_from(
    x: Values,
    y: Values | None = None,
    ptr: Tensor | None = None,
    centre: Tensor | None = None,
    sharpness: float | Tensor | None = None,
) -> tuple[Values, Values]:
    """Return x − c and y − c in at least float32, where c is ``centre`` or the mean of y.

    The two results are one object if y is ``None``, which stands for x. A function of ‖x_i‖² + ‖y_j‖² − 2x_i·y_j does
    not depend on c, but its rounding error grows with the squares. The result is in double precision if single
    precision does not resolve e^{−a·½z²}, where a is ``sharpness``. Under torch.compile and other transformations,
    where tensors have no values, the result is not widened.
    """
    dtype = wide_dtype(x.dtype)
    # The mean of the senders, which all receivers share; any point would do in exact arithmetic.
    senders = x if y is None else y
    point = detached_mean_rows(senders.to(dtype), ptr) if centre is None else centre
    first = x.to(dtype) - point.to(dtype)
    second = first if y is None else y.to(dtype) - point.to(dtype)
    if sharpness is None or resolved(sharpness, *{first, second}):
        return first, second
    # The point in the narrower dtype serves, too: distances are the same from any point.
    wide = x.double()
    return measured_from(wide, None if y is None else y.double(), ptr, point)


def resolved(sharpness: float | Tensor, *vectors: Values) -> bool:
    """Whether the dtype of these vectors resolves e^{−a·½z²} between them; ``True`` where tensors have no values."""
    first = vectors[0]
    if first.dtype == torch.float64 or first.is_meta or not first.numel():
        return True
    if not values_only():
        return True
    largest = max(0.5 * z.detach().square().sum(2).max() for z in vectors)
    # Not `<=`: a NaN stays NaN in double precision, so it counts as resolved.
    return not bool(sharpness * largest > RESOLVED)


def distance_features(
    x: Values,
    y: Values | None = None,
    ptr: Tensor | None = None,
    *,
    centre: Tensor | None = None,
    sharpness: float | Tensor | None = None,
) -> tuple[Features, Features]:
    """Return features whose inner products are −½ times the squared distances between two sets of vectors.

    The features are q = [x, −½‖x‖², 1] and k = [y, 1, −½‖y‖²], in at least float32:

        q_i·k_j = −½‖x_i − y_j‖²

    With these features, a function f(‖x_i − y_j‖²) of a penalty is a function of an inner product for vectors of any
    norm. The score 2 − ½z² of DIFFormer-s stays low-rank. The score equals 1 + q_i·k_j of the vectors themselves for
    unit vectors only (docs/errata.md, D8).

    Args:
        x: vectors of the receivers [N, H, D].
        y: vectors of the senders [N, H, D]. ``None`` stands for x.
        ptr: row boundaries [B+1] of a ragged batch, on the CPU. ``None`` is one graph.
        centre: points [1 or N, H, D] that are subtracted from the vectors. ``None`` is the mean of y in every graph,
            which keeps the squares and their rounding errors small.
        sharpness: a, if e^{−a·½z²} must be accurate. The features are then in double precision if single precision does
            not resolve it. ``None`` leaves the precision as it is.

    Returns:
        q and k, both [N, H, D + 2]; y = ``None`` makes k from the same vectors.

    Examples:
        >>> query, key = distance_features(q)
        >>> torch.allclose((query[0] * key[1]).sum(1), -(q[0] - q[1]).square().sum(1) / 2, atol=1e-5)
        True
    """
    _check_rows(x, "x")
    if y is not None and (not isinstance(y, Tensor) or y.shape != x.shape):
        raise ValueError(
            f"x and y must have one shape; got {describe(x)} and {describe(y)}."
        )
    first, second = measured_from(x, y, ptr, centre, sharpness)
    first_half = -0.5 * first.square().sum(2, keepdim=True)
    # Of one state in both roles the squares are summed once.
    second_half = first_half
    if second is not first:
        second_half = -0.5 * second.square().sum(2, keepdim=True)
    one = torch.ones_like(first_half)
    return torch.cat([first, first_half, one], dim=2), torch.cat(
        [second, one, second_half], dim=2
    )
