"""Features that turn functions of a distance into functions of an inner product."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.graph.ops import mean_rows, values_only
from diffusion_mp.kernels.unit import unit_vectors

#: The largest a·½‖x − c‖² whose rounding in single precision leaves e^{−a·½z²} five digits.
RESOLVED = 64.0


def measured_from(
    x: Float[Tensor, "N H D"],
    y: Float[Tensor, "N H D"],
    ptr: Tensor | None = None,
    centre: Tensor | None = None,
    sharpness: float | Tensor | None = None,
) -> tuple[Float[Tensor, "N H D"], Float[Tensor, "N H D"]]:
    """x − c and y − c in at least float32, the same object where x is y; c is ``centre`` or the mean of y in its graph.

    A function of ‖x_i‖² + ‖y_j‖² − 2x_i·y_j does not see c, but its rounding grows with the squares. Where they are so
    large that single precision does not resolve e^{−a·½z²}, with the ``sharpness`` a, the result is in double
    precision; under torch.compile and other transformations, which know no values, it is not.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    centre = mean_rows(y.to(dtype), ptr) if centre is None else centre
    from_centre = _less(x, y, centre, dtype)
    if sharpness is None or dtype == torch.float64 or not (x.numel() and values_only()) or x.is_meta:
        return from_centre
    farthest = max(z.detach().square().sum(2).max() for z in from_centre)
    return _less(x, y, centre, torch.float64) if bool(sharpness * farthest > 2 * RESOLVED) else from_centre


def _less(x: Tensor, y: Tensor, centre: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    less = x.to(dtype) - centre.to(dtype)
    return less, less if y is x else y.to(dtype) - centre.to(dtype)


def distance_features(
    x: Float[Tensor, "N H D"],
    y: Float[Tensor, "N H D"] | None = None,
    ptr: Tensor | None = None,
    *,
    centre: Tensor | None = None,
    sharpness: float | Tensor | None = None,
) -> tuple[Float[Tensor, "N H F"], Float[Tensor, "N H F"]]:
    r"""q, k with q_i·k_j = −½‖x_i − y_j‖² (y = x by default): q = [x, −½‖x‖², 1], k = [y, 1, −½‖y‖²].

    So a penalty's f(‖x_i − x_j‖²) is a score of an inner product, exactly and for states of any norm: the
    DIFFormer-s score 2 − ½z² stays low-rank, and the sigmoid's and the Gaussian's are tiled like any other. (The paper
    writes 1 + q_i·k_j for it, which is the same for unit vectors only; D8 of docs/errata.md.)

    Args:
        x, y: vectors of receivers and senders. They are measured from a point amid them, so that what all have in
            common does not cost the digits of their distances.
        ptr: row boundaries of a ragged batch, each graph of which has a point of its own; ``None`` is one graph.
        centre: these points [1 or N, H, D], the same for all rows that meet; by default the means of y.
        sharpness: a, where e^{−a·½z²} has to be exact: features are in double precision if single does not resolve it.

    Returns:
        q and k in at least float32: the squares leave the range of half precision.

    Examples:
        >>> query, key = distance_features(q)
        >>> distance = torch.cdist(q.transpose(0, 1), q.transpose(0, 1))
        >>> torch.allclose(torch.einsum("ihf,jhf->hij", query, key), -distance.square() / 2, atol=1e-5)
        True
    """
    x, y = measured_from(x, x if y is None else y, ptr, centre, sharpness)

    def half(z: Tensor) -> Tensor:
        return -0.5 * z.square().sum(2, keepdim=True)

    one, of_x = x.new_ones(*x.shape[:2], 1), half(x)
    return torch.cat([x, of_x, one], dim=2), torch.cat([y, one, of_x if y is x else half(y)], dim=2)


def unit_rows(q: Float[Tensor, "N H F"], k: Float[Tensor, "N H F"]) -> tuple[Tensor, Tensor]:
    """Both with every vector divided by its norm, a zero vector left as it is; the same object where they are."""
    unit = unit_vectors(q)
    return unit, unit if k is q else unit_vectors(k)


def with_constant(features: Float[Tensor, "N H F"], constant: float) -> Float[Tensor, "N H G"]:
    """Append a constant feature c, which adds c·c′ to every inner product.

    Args:
        features: [N, H, F]; the result is [N, H, F + 1].
        constant: c.

    Examples:
        >>> query, key = with_constant(q, 1.0), with_constant(k, 1.0)
        >>> torch.allclose((query * key).sum(2), (q * k).sum(2) + 1)
        True
    """
    return torch.cat([features, features.new_full((*features.shape[:2], 1), constant)], dim=2)
