"""`diffusion-mp fit | validate | test | predict`: Lightning's command line with our defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from jsonargparse import set_parsing_settings
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger

from .datamodules import DigitsDataModule, FullGraphDataModule, PlanetoidDataModule
from .local import check_local
from .module import NodeClassifier
from .progress import EpochProgress

__all__ = ["DiffusionCLI", "DigitsDataModule", "PlanetoidDataModule"]


class DiffusionCLI(LightningCLI):
    """Logs to `<out>/<name>/version_k`, keeps the best and the last checkpoint there, tests the best one after fit."""

    def __init__(self, args: list[str]) -> None:
        check_local(args)
        set_parsing_settings(config_read_mode_fsspec_enabled=False)  # Lightning lets any option be read from anywhere
        super().__init__(
            NodeClassifier,
            FullGraphDataModule,
            subclass_mode_data=True,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"max_epochs": 500, "log_every_n_steps": 1, "enable_model_summary": False},
            parser_kwargs={
                "prog": "diffusion-mp",
                **{name: {"prog": f"diffusion-mp {name}"} for name in self.subcommands()},
            },
            args=args,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Names of the run, the two callbacks, and channels that the data set decides."""
        parser.add_argument("--out", type=str, default="runs", help="folder of all runs")
        parser.add_argument("--name", type=str, default="fit", help="folder of this kind of run below --out")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        # The last epoch has a callback of its own: save_last would only copy the best one (Lightning 2.6).
        parser.add_lightning_class_args(ModelCheckpoint, "last")
        parser.add_lightning_class_args(EarlyStopping, "early_stopping")
        parser.set_defaults(
            {
                "checkpoint.monitor": "val_score",
                "checkpoint.mode": "max",
                "checkpoint.filename": "best-{epoch}-{val_acc:.4f}",
                "last.filename": "last",
                "last.enable_version_counter": False,
                "early_stopping.monitor": "val_score",
                "early_stopping.mode": "max",
                "early_stopping.patience": 200,
            }
        )
        for source, target in (("num_features", "in_channels"), ("num_classes", "out_channels")):
            parser.link_arguments(f"data.{source}", f"model.model.init_args.{target}", apply_on="instantiate")

    def before_instantiate_classes(self) -> None:
        """A resumed run keeps its checkpoints in one folder, so that the best is the best of the whole run."""
        config = self.config[self.subcommand]
        if self.subcommand == "fit" and config.ckpt_path and Path(config.ckpt_path).is_file():
            for callback in (config.checkpoint, config.last):
                callback.dirpath = callback.dirpath or str(Path(config.ckpt_path).parent)

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """The trainer with both loggers in one folder and one bar over epochs, unless configured otherwise."""
        options = self._get(self.config_init, "trainer")
        if options.get("logger") in (None, True):
            kwargs["logger"] = self._loggers()
        if options.get("enable_progress_bar") is not False:
            kwargs["callbacks"] = [*(options.get("callbacks") or []), EpochProgress()]
        return super().instantiate_trainer(**kwargs)

    def _loggers(self) -> list[Logger]:
        out, name = self._get(self.config_init, "out"), self._get(self.config_init, "name")
        versions = [int(p.name[8:]) for p in Path(out, name).glob("version_*") if p.name[8:].isdigit()]
        version = max(versions, default=-1) + 1
        return [CSVLogger(out, name, version), TensorBoardLogger(out, name, version)]

    def fit(self, **kwargs: Any) -> None:
        """Trains, or goes on from `--ckpt_path`, reading checkpoints as plain tensors."""
        self.trainer.fit(**{**kwargs, "weights_only": True})

    def after_fit(self) -> None:
        """Tests the best checkpoint and says where everything lies."""
        best = self._get(self.config_init, "checkpoint").best_model_path
        if best:
            self.trainer.test(self.model, datamodule=self.datamodule, ckpt_path=best, weights_only=True)
            print(f"Best checkpoint: {best}\nLogs: {self.trainer.log_dir}")
