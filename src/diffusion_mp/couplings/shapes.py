"""Shapes of the tensors of couplings: N nodes, H heads, E pairs of nodes, D channels and F features per head."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

#: The values that nodes send and receive.
Values = Float[Tensor, "N H D"]
#: Values before and after a product, where one head broadcasts.
Sent = Float[Tensor, "N in_heads D"]
Received = Float[Tensor, "N out_heads D"]
#: A state of one head.
State = Float[Tensor, "N C"]
#: q and k of receivers and senders.
Features = Float[Tensor, "N H F"]
#: A number per node, such as its row sum.
ByRow = Float[Tensor, "N heads"]
#: Listed pairs of a source j (first row) and a target i.
Pairs = Int[Tensor, "two E"]
#: s_ij of listed pairs.
Entries = Float[Tensor, "E heads"]
#: The matrix of every head.
Matrices = Float[Tensor, "heads N N"]
#: A matrix that every head applies to states, or its diagonal.
Maps = Float[Tensor, "heads C C"] | Float[Tensor, "heads C"]
