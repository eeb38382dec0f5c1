"""`diffusion-mp fit | validate | test | predict`: Lightning's command line with our defaults."""

import csv
import logging
import shlex
import warnings
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace, set_parsing_settings
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from torch import Tensor
from tqdm import tqdm

from diffusion_mp.checks import as_whole, describe
from diffusion_mp_experiments.files.reading import as_path
from diffusion_mp_experiments.packaged import configuration
from diffusion_mp_experiments.train.checkpoints import check_writable, load_checkpoint
from diffusion_mp_experiments.train.classifiers import NodeClassifier
from diffusion_mp_experiments.train.datamodules import (
    DigitsDataModule,
    PlanetoidDataModule,
)
from diffusion_mp_experiments.train.resume import CheckpointFiles

__all__ = ["DiffusionCLI", "DigitsDataModule", "PlanetoidDataModule", "run_lightning"]

_UNWRITTEN = "Unable to serialize instance "
_CONFIG_OPTIONS = ("--config", "-c")
# What a checkpoint may decide; never which class is made.
_SETTINGS = ("lr", "weight_decay", "optimizer")
_PARTS = {
    "state_dict": dict,
    "hyper_parameters": dict,
    "epoch": int,
    "loops": dict,
    "pytorch-lightning_version": str,
}


def run_lightning(args: list[str]) -> None:
    """Run a subcommand; errors of Lightning's configuration are raised as ValueErrors.

    Lightning's warnings are shown, except three: deprecations, data without workers, and checkpoints of a resumed run.
    """
    # Their announcements have the level INFO.
    names = ("pytorch_lightning", "lightning.pytorch", "lightning_fabric")
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    with warnings.catch_warnings():
        for logger in levels:
            logger.setLevel(logging.WARNING)
        warnings.filterwarnings(
            "ignore",
            category=FutureWarning,
            module=r"(pytorch_lightning|lightning_fabric)\b",
        )
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        warnings.filterwarnings(
            "ignore", message="Checkpoint directory .* exists and is not empty"
        )
        try:
            DiffusionCLI(args)
        except MisconfigurationException as error:
            raise ValueError(str(error)) from error
        except (ValueError, RuntimeError) as error:
            # Jsonargparse puts its own words before the error of the data.
            if str(error).startswith("Call to compute_fn") and isinstance(
                error.__cause__, (OSError, ValueError)
            ):
                raise error.__cause__ from None
            # What Lightning and torch refuse before they train: the second a checkpoint of another model.
            if str(error).startswith(("Early stopping conditioned on", "Error(s) in")):
                raise ValueError(str(error)) from error
            raise
        finally:
            for logger, level in levels.items():
                logger.setLevel(level)


class _Parser(LightningArgumentParser):
    """Parser that can read the configurations it writes, config.yaml of a run and --print_config.

    jsonargparse puts words in the place of values that it cannot write. Such values are text where a function is
    allowed too, and objects that are defaults, such as the device of StochasticWeightAveraging.
    """

    def dump(self, *args: Any, **kwargs: Any) -> str:
        text = super().dump(*args, **kwargs)
        if _UNWRITTEN not in text:
            return text
        # The version of Lightning is a comment, which YAML would drop.
        header = "".join(
            f"{line}\n" for line in text.splitlines() if line.startswith("#")
        )
        return header + yaml.safe_dump(
            _readable(yaml.safe_load(text)), sort_keys=False, allow_unicode=True
        )


def _readable(value: Any) -> Any:
    """Restore text, and leave out defaults that have no text."""
    if isinstance(value, dict):
        return {
            name: _readable(each)
            for name, each in value.items()
            if not str(each).startswith(f"{_UNWRITTEN}<")
        }
    if isinstance(value, list):
        return [_readable(each) for each in value]
    return value.removeprefix(_UNWRITTEN) if isinstance(value, str) else value


class DiffusionCLI(LightningCLI):
    """Log to `<out>/<name>/version_k`, keep the best and the last checkpoint there, and test the best one after fit.

    With `--ckpt_path` the settings of the command line override the settings of the checkpoint's run, which override
    the defaults.
    """

    def __init__(self, args: list[str]) -> None:
        args = _with_files(args)
        self._args = args
        # Lightning lets any option be read from anywhere.
        set_parsing_settings(config_read_mode_fsspec_enabled=False)
        super().__init__(
            NodeClassifier,
            LightningDataModule,
            subclass_mode_data=True,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={
                "max_epochs": 500,
                "log_every_n_steps": 1,
                "enable_model_summary": False,
            },
            parser_class=_Parser,
            parser_kwargs={"prog": "diffusion-mp"}
            | {k: {"prog": f"diffusion-mp {k}"} for k in self.subcommands()},
            args=args,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--out", type=str, default="runs", help="folder of all runs"
        )
        parser.add_argument(
            "--name",
            type=str,
            default="fit",
            help="folder of this kind of run below --out",
        )
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        # The last epoch has a callback of its own: save_last would only copy the best one (Lightning 2.6).
        parser.add_lightning_class_args(ModelCheckpoint, "last")
        parser.add_lightning_class_args(EarlyStopping, "early_stopping")
        parser.set_defaults(
            {
                "checkpoint.monitor": "val_score",
                "checkpoint.mode": "max",
                "checkpoint.filename": "best-{epoch}-{val_acc:.4f}",
                # An epoch that is done again, after a kill before last.ckpt was written, has the same best checkpoint.
                "checkpoint.enable_version_counter": False,
                "last.filename": "last",
                "last.enable_version_counter": False,
                "early_stopping.monitor": "val_score",
                "early_stopping.mode": "max",
                "early_stopping.patience": 200,
            }
        )
        # The data decide how wide the model is at its ends.
        for name, target in (
            ("num_features", "in_channels"),
            ("num_classes", "out_channels"),
        ):
            width = partial(_width, name=name)
            parser.link_arguments(
                "data", f"model.model.init_args.{target}", width, apply_on="instantiate"
            )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments, then again with the settings of a checkpoint's run in the place of the defaults."""
        self.config = parser.parse_args(args)
        command = self.config.subcommand
        config = self.config[command]
        if config.weights_only is False:
            raise ValueError(
                "weights_only cannot be false: checkpoints are read as tensors and plain types, always."
            )
        path = config.ckpt_path
        if path is None:
            if command == "predict":
                raise ValueError(
                    "predict needs --ckpt_path, a checkpoint of `diffusion-mp fit`; got none."
                )
            return
        checkpoint = load_checkpoint(path)
        if not isinstance(checkpoint, dict) or not all(
            isinstance(checkpoint.get(k), t) for k, t in _PARTS.items()
        ):
            raise ValueError(
                f"{path} holds no checkpoint of `diffusion-mp fit`, which has {', '.join(_PARTS)}."
            )
        if command == "fit" and "optimizer_states" not in checkpoint:
            raise ValueError(
                f"{path} holds weights alone; a run goes on from what holds its optimiser too."
            )
        before = checkpoint["hyper_parameters"]
        settings = {name: before[name] for name in _SETTINGS if name in before}
        # Defaults are not checked, so this does it.
        parser.parse_object({command: {"model": settings}}, self.config)
        self._parser(command).set_defaults(
            {f"model.{name}": value for name, value in settings.items()}
        )
        self.config = parser.parse_args(args)
        # As an absolute path, Lightning does not take it for a keyword.
        self.config[command].ckpt_path = str(as_path(path, "--ckpt_path").resolve())

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning would let the checkpoint's settings win over the settings of the command line."""

    def before_instantiate_classes(self) -> None:
        """Let a resumed run keep its checkpoints in one folder, so that the best one is the best of all its parts."""
        config = self.config[self.subcommand]
        config.out = str(as_path(config.out, "--out"))
        # a class without arguments; the widths of the data are linked to it.
        if "init_args" not in config.model.model:
            config.model.model.init_args = Namespace()
        check_writable(Path(config.out, config.name))
        # Lightning would write 0.0000 for a metric that is not logged.
        if name := config.checkpoint.filename:
            config.checkpoint.filename = name.replace(
                "{val_acc", f"{{val_{config.model.metric}"
            )
        if self.subcommand == "fit" and config.ckpt_path:
            # A folder of the new version would make the best of this part the best of all.
            for callback in (config.checkpoint, config.last):
                callback.dirpath = callback.dirpath or str(
                    Path(config.ckpt_path).parent
                )
                check_writable(callback.dirpath)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        options = self._get(self.config_init, "trainer")
        kwargs["plugins"] = [*_listed(options.get("plugins")), CheckpointFiles()]
        if options.get("logger") in (None, True):
            kwargs["logger"] = self._loggers()
        elif options.get("logger") is False and options.get("default_root_dir") is None:
            # Lightning would write to the working directory.
            kwargs["default_root_dir"] = self._loggers()[0].log_dir
        if options.get("enable_progress_bar") is not False:
            kwargs["callbacks"] = [*_listed(options.get("callbacks")), EpochProgress()]
        try:
            return super().instantiate_trainer(**kwargs)
        except ModuleNotFoundError as error:
            # Of a logger or a precision whose package is not installed.
            raise ValueError(
                f"The trainer needs a package that is not installed: {error}"
            ) from error

    def _loggers(self) -> list[Logger]:
        """Return loggers that write to the first free folder version_k; several processes may look for it at once."""
        out = self._get(self.config_init, "out")
        name = self._get(self.config_init, "name")
        taken = [
            int(p.name[8:])
            for p in Path(out, name).glob("version_*")
            if p.name[8:].isdigit()
        ]
        for version in count(max(taken, default=-1) + 1):
            # Of two processes only one can make a folder; the other tries the next number.
            with suppress(FileExistsError):
                Path(out, name, f"version_{version}").mkdir()
                break
        return [CSVLogger(out, name, version), TensorBoardLogger(out, name, version)]

    def predict(self, **kwargs: Any) -> None:
        """Write predictions.csv, a row per prediction, and print where it is."""
        batches = _tensors(self.trainer.predict(**kwargs))
        path = Path(
            self.trainer.log_dir or self._get(self.config_init, "out"),
            "predictions.csv",
        )
        rows = [
            row for batch in batches for row in batch.reshape(len(batch), -1).tolist()
        ]
        names = ["prediction"]
        if rows and len(rows[0]) > 1:
            names = [f"prediction_{k}" for k in range(len(rows[0]))]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["row", *names])
            writer.writerows([number, *row] for number, row in enumerate(rows))
        print(f"Predictions: {path}")

    def fit(self, **kwargs: Any) -> None:
        """Train, or go on from `--ckpt_path`; test the best checkpoint and print where everything is."""
        try:
            self.trainer.fit(**kwargs)
            # There is no best checkpoint where nothing was validated.
            if best := self._get(self.config_init, "checkpoint").best_model_path:
                self.trainer.test(
                    self.model, datamodule=self.datamodule, ckpt_path=best
                )
                print(f"Best checkpoint: {best}\nLogs: {self.trainer.log_dir}")
        # A signal too, since the note says how to go on.
        except BaseException as error:
            last = self._get(self.config_init, "last").best_model_path
            if Path(last).is_file():
                error.add_note(
                    f"Go on from the last complete epoch with\n  {_resuming(self._args, last)}"
                )
            raise


class EpochProgress(ProgressBar):
    """One bar over epochs, on stderr: Lightning's bars, one per epoch on stdout, would flicker among the results."""

    _bar = tqdm(disable=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        # −1 stands for no end.
        total = trainer.max_epochs if trainer.max_epochs != -1 else None
        hidden = not trainer.is_global_zero
        self._bar = tqdm(
            desc="epoch", total=total, initial=trainer.current_epoch, disable=hidden
        )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = self.get_metrics(trainer, pl_module)
        # The number of the version does not measure the epoch.
        metrics.pop("v_num", None)
        self._bar.set_postfix(metrics, False)
        self._bar.update(trainer.current_epoch + 1 - self._bar.n)

    def on_train_end(self, *_: Any) -> None:
        self._bar.close()

    on_exception = on_train_end  # type: ignore[assignment]  # before the message

    def disable(self) -> None:
        """Do nothing: in processes other than the first the bar is hidden already."""

    enable = disable


def _width(data: LightningDataModule, name: str) -> int:
    try:
        return as_whole(getattr(data, name), f"{type(data).__name__}.{name}")
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"The model takes its width from {type(data).__name__}.{name}: {error} Give the data module the properties "
            "num_features and num_classes, whole numbers."
        ) from error


def _with_files(args: Sequence[str]) -> list[str]:
    """Replace the names of this package's configurations after `--config` by the paths of their files.

    Raises:
        FileNotFoundError: the value is an address, which would be a program from elsewhere, or no such file exists.
    """
    words: list[str] = []
    for word in args:
        option, equals, value = word.partition("=")
        if equals and option in _CONFIG_OPTIONS:
            words.append(f"{option}={_local_configuration(value)}")
        elif words and words[-1] in _CONFIG_OPTIONS:
            words.append(_local_configuration(word))
        else:
            words.append(word)
    return words


def _local_configuration(value: str) -> str:
    if "://" in value:
        raise FileNotFoundError(
            f"--config must be a file of this machine; got the address {value}. A configuration names classes to "
            "import and run: download it, read it, and give its path."
        )
    return configuration(value)


def _resuming(args: Sequence[str], checkpoint: str) -> str:
    parser = ArgumentParser(allow_abbrev=False)
    # Only to leave out the checkpoint that this run began with.
    parser.add_argument("--ckpt_path")
    _, kept = parser.parse_known_args(args)
    return shlex.join(["diffusion-mp", *kept, "--ckpt_path", checkpoint])


def _tensors(predictions: Any) -> Iterator[Tensor]:
    if isinstance(predictions, Tensor) and predictions.dim() > 0:
        yield predictions
    elif isinstance(predictions, (list, tuple)):
        for part in predictions:
            yield from _tensors(part)
    else:
        raise ValueError(
            f"predict_step must return a tensor with a row per prediction; got {describe(predictions)}."
        )


def _listed(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(value)
    if value is None:
        return []
    return [value]
