"""``LabelPropagation``: diffusion with labels as the state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from diffusion_mp import checks
from diffusion_mp.checks import Count
from diffusion_mp.diffusivities import AdjacencyDiffusivity, Diffusivity
from diffusion_mp.graph import Graph
from diffusion_mp.layers.pyg import KnowsPyGNames, refuse_inputs
from diffusion_mp.models.base import Edges
from diffusion_mp.saving import Saved
from diffusion_mp.updates import StateUpdate, teleport, teleport_limit

# Beyond one per node: a larger label is an error, and would cost memory.
MANY_CLASSES = 1 << 16


class LabelPropagation(KnowsPyGNames, Saved):
    r"""Spread known labels over a graph, or over an attention, without training.

        Y^(k+1) = α S Y^(k) + (1 − α) Y^(0)

    clamped to [0, 1] (Zhu & Ghahramani 2002; Zhou et al. 2004). The limit without clamping is (Zhou et al. 2004, Eq. 4)

        Y* = (1 − α)(I − αS)⁻¹ Y^(0)

    Edge weights are the third argument of a call (in PyG it is the mask). They are normalised by degrees.

    Args:
        num_layers: Number of steps. ``None`` computes the limit, for a symmetric S or for a symmetric Ω divided by its
            row sums.
        alpha: α in (0, 1], and below 1 for the limit.
        diffusivity: Diffusivity of S, with one head; D^-½AD^-½ by default. ``SymmetricDiffusivity(...,
            diagonal=False)`` gives scikit-learn's ``LabelSpreading``, except for its final division of rows.

    Shapes:
        y: Class labels [N] or [N, 1] of integers, negative where unknown; or soft labels [N, K] of floating point.
        edge_index: [2, E], a sparse CSR tensor, a ``Graph``, or ``None``.
        edge_weight: [E].
        mask: The nodes with known labels, [N] of bool, or their indices.
        batch: [N], sorted.
        features: [N, F], if and only if the diffusivity reads nodes.
        output: [N, K] for K classes.

    Examples:
        >>> LabelPropagation(num_layers=None, alpha=0.5)(torch.tensor([0, 0, 0, 1, 1, 1]), edge_index).shape
        torch.Size([6, 2])
    """

    references = ("zhou2004learning",)

    def __init__(
        self,
        num_layers: Count | None = 50,
        alpha: float = 0.9,
        diffusivity: Diffusivity | None = None,
    ) -> None:
        super().__init__()
        # At α = 1 the labels vanish from the equation of the limit, and I − S is singular.
        checks.check_number(
            alpha,
            "alpha",
            lambda a: 0 < a < 1 or (a == 1 and num_layers is not None),
            "lie in (0, 1], and below 1 for num_layers=None",
        )
        self.update: StateUpdate
        if num_layers is None:
            self.update = teleport_limit(1 - alpha)
        else:
            self.update = teleport(1 - alpha)
        if diffusivity is not None and diffusivity.heads != 1:
            raise ValueError(
                f"diffusivity must have one head, for there is one state, the labels; got {diffusivity.heads} heads."
            )
        self.num_layers = num_layers
        self.diffusivity = diffusivity or AdjacencyDiffusivity("sym")
        # Whether entries depend on the features of nodes, rather than on their positions only. A sum of diffusivities
        # does if one of its parts does.
        self.reads_features = any(
            isinstance(part, Diffusivity)
            and part.depends_on not in ("nothing", "parts")
            and not part.positional
            for part in self.diffusivity.modules()
        )

    # There is nothing to learn, and the memory of all steps would be kept for it.
    @torch.no_grad()
    def forward(
        self,
        y: Tensor,
        edge_index: Edges = None,
        edge_weight: Tensor | None = None,
        mask: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        features: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        refuse_inputs(self, others)
        y = _soft(y)
        # A row of zeros is a node without a label, whether the mask says so or its number.
        if mask is not None:
            y = y * checks.as_node_mask(mask, "mask", y.size(0), y.device).unsqueeze(1)
        # A diffusivity of states would read the labels, and nodes without one would all look alike.
        if self.reads_features != (features is not None):
            raise ValueError(
                f"features [num_nodes, channels] must be passed if and only if the diffusivity reads nodes, and must "
                f"not read the labels; got {checks.describe(features)}."
            )
        if features is not None:
            checks.check_rows(features, "features", y)
        graph = Graph.coerce(y, edge_index, edge_weight, batch)
        coupling = self.diffusivity(y if features is None else features, graph)
        if self.num_layers is None:
            return self.update(y, coupling)
        state = y
        # Rows of D^-½AD^-½ may sum to more than one, so a step is not an average. The clamp keeps labels in [0, 1].
        for _ in range(self.num_layers):
            state = self.update(state, coupling, source=y).clamp(0, 1)
        return state


def _soft(y: Tensor) -> Tensor:
    """Check labels, and return them as soft labels [N, K]; zeros where class numbers are negative."""
    checks.check_kind(
        y, "y", Tensor, "a tensor of class labels [N] or soft labels [N, K]"
    )
    if y.is_floating_point() and y.dim() == 2:
        if y.size(1) == 1:
            raise ValueError(
                f"y must have a column for every class as soft labels; got {checks.describe(y)}, in which all nodes "
                f"would be of one class. Class numbers are integers, y.long(); of the probabilities of one of two "
                f"classes, the soft labels are torch.cat([1 - y, y], 1)."
            )
        checks.check_has_values(y, "y")
        checks.check_state(y, "y")
        return y
    labels = checks.label_vector(y)
    # A column for every class: a label read from the wrong column would allocate gigabytes before anybody saw why.
    classes = 1 + max(int(labels.max()), 0) if labels.numel() else 1
    if classes > labels.numel() + MANY_CLASSES:
        raise ValueError(
            f"y must number the classes of {labels.numel()} nodes; it reaches {classes - 1}."
        )
    soft = one_hot(labels.clamp(min=0), classes).to(torch.get_default_dtype())
    return soft * (labels >= 0).unsqueeze(1)
