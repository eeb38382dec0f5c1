"""A trainer that writes and prints nothing."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl


def quiet_trainer(**options: Any) -> pl.Trainer:
    """A ``Trainer`` on the CPU."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(**{"accelerator": "cpu", **quiet, **options})
