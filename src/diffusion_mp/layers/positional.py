"""``LaplacianEncoder``: Laplacian eigenvectors as node features, whatever their signs."""

from __future__ import annotations

from types import NoneType

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch_geometric.nn.inits import reset

from diffusion_mp.errors import check_counts, check_kind, check_mask, check_state


class LaplacianEncoder(nn.Module):
    r"""p_i = ρ(Σ_r [φ(v_ir, λ_r) + φ(−v_ir, λ_r)]), whatever the signs of the eigenvectors v_r (Lim et al. 2023).

    A DeepSet over eigenvectors, as the encoder "DeepSet" of GraphGPS (Rampášek et al. 2022), which sums φ(v_ir, λ_r)
    instead and trains on random signs. Both φ and ρ are two linear layers with a SiLU between: with a ReLU
    φ(v) + φ(−v) is flat around v = 0. Entries that the mask leaves out do not enter, so a graph with fewer eigenvectors
    is encoded as it would be without padding.

    Args:
        out_channels: channels of the encoding (16 in SFi-Former, Table 5).
        hidden_channels: between φ and ρ; ``2 * out_channels`` by default.

    Shapes:
        eigenvectors, eigenvalues, mask: [N, k] as :class:`AddLaplacianPE` stores them, any k; without eigenvalues they
        count as 0, without mask all entries are read. Output: [N, out_channels].

    Raises:
        TypeError, ValueError: a number of channels below 1, or shapes that differ.

    Examples:
        >>> vectors, values, valid = torch.rand(6, 2), torch.rand(6, 2), torch.ones(6, 2, dtype=torch.bool)
        >>> LaplacianEncoder(8)(vectors, values, valid).shape
        torch.Size([6, 8])
    """

    references = ("lim2023signnet",)

    def __init__(self, out_channels: int, hidden_channels: int | None = None) -> None:
        super().__init__()
        check_counts(out_channels=out_channels)
        hidden = 2 * out_channels if hidden_channels is None else hidden_channels
        check_counts(hidden_channels=hidden)
        self.out_channels, self.hidden_channels = out_channels, hidden
        self.phi = nn.Sequential(nn.Linear(2, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.rho = nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, out_channels))

    def reset_parameters(self) -> None:
        """Draw every parameter anew, in the order of the constructor."""
        reset(self.phi)
        reset(self.rho)

    def forward(
        self,
        eigenvectors: Float[Tensor, "N R"],
        eigenvalues: Float[Tensor, "N R"] | None = None,
        mask: Bool[Tensor, "N R"] | None = None,
    ) -> Float[Tensor, "N C"]:
        """The encoding of every node."""
        check_state(eigenvectors, "eigenvectors", module=self)
        values = torch.zeros_like(eigenvectors) if eigenvalues is None else eigenvalues
        check_state(values, "eigenvalues", module=self)
        check_kind(mask, "mask", (Tensor, NoneType), "a bool tensor of the shape of eigenvectors")
        for name, other in (("eigenvalues", values), ("mask", mask)):
            if other is not None and other.shape != eigenvectors.shape:
                raise ValueError(
                    f"{name} must have the shape {list(eigenvectors.shape)} of eigenvectors; got {list(other.shape)}."
                )
        both = self.phi(torch.stack([eigenvectors, values], -1)) + self.phi(torch.stack([-eigenvectors, values], -1))
        if mask is not None:
            check_mask(mask, eigenvectors)
            both = both.masked_fill(~mask.unsqueeze(-1), 0.0)
        encoded: Tensor = self.rho(both.sum(dim=1))
        return encoded

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.out_channels}, hidden_channels={self.hidden_channels})"
