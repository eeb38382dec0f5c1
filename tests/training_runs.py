"""What tests of training share: a configuration, a trainer that prints nothing, and equality of checkpoints."""

from typing import Any

import pytorch_lightning as pl
import torch

from diffusion_mp_experiments.packaged import configs_folder

CONFIG = str(configs_folder() / "digits_difformer_s.yaml")
TINY = ["--model.model.hidden_channels=8", "--model.model.num_layers=1"]


def quiet_trainer(**options: Any) -> pl.Trainer:
    quiet = dict.fromkeys(
        (
            "logger",
            "enable_checkpointing",
            "enable_progress_bar",
            "enable_model_summary",
        ),
        False,
    )
    return pl.Trainer(**{"accelerator": "cpu", **quiet, **options})


def same(state: Any, other: Any) -> bool:
    """Whether two checkpoints agree bit by bit, but for the time that was spent."""
    if isinstance(state, torch.Tensor):
        return torch.equal(state, other)
    if isinstance(state, dict):
        return state.keys() == other.keys() and all(
            same(state[key], other[key]) for key in state if key != "spent"
        )
    if isinstance(state, (list, tuple)):
        return len(state) == len(other) and all(map(same, state, other))
    return bool(state == other)
