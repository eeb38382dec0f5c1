"""Labels to tune hyper-parameters on, and labels to report results on."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from diffusion_mp.data.splits import label_mask
from diffusion_mp.errors import check_flags, check_number

_SEED = 2025  # of the pool; the same in every run, or it would be no pool


def visible_labels(y: Int[Tensor, " N"], tuning: bool, share: float = 0.3) -> Int[Tensor, " N"]:
    """Return the labels that splits for tuning, or for reported results, are drawn from; all others are −1.

    A fixed random `share` of the labelled nodes (or graphs) belongs to tuning, the others to results. Splits that are
    drawn from these labels (`random_split_per_class`, `random_split` ignore negative ones) train, validate and test on
    their own side, so no label of a reported result was seen while settings were chosen.

    Raises:
        TypeError, ValueError: y holds no whole numbers [N], or the share is not in (0, 1).
    """
    check_flags(tuning=tuning)
    check_number(share, "share")
    if not 0 < share < 1:
        raise ValueError(f"share must lie in (0, 1), the part of the labels for tuning; got {share}.")
    y = torch.as_tensor(y)
    labelled = label_mask(y).cpu().nonzero().flatten()
    order = torch.randperm(len(labelled), generator=torch.Generator().manual_seed(_SEED))
    pool = torch.zeros(len(y), dtype=torch.bool)
    pool[labelled[order[: int(share * len(labelled))]]] = True
    return y.where(pool.to(y.device) == tuning, -1)
