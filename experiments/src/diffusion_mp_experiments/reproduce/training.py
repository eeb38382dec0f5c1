"""One run of a table: a fresh model on one split, its epoch chosen on validation, as a record of numbers."""

import hashlib
import inspect
import json
import math
import resource
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from pydoc import ErrorDuringImport, locate
from typing import Any

import torch
from jsonargparse import ArgumentError, ArgumentParser
from pytorch_lightning import LightningDataModule, LightningModule, seed_everything
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch_geometric.data import Data
from torchmetrics import Metric

from diffusion_mp.diagnostics.hooks import declared, hooked
from diffusion_mp.errors import ConvergenceError, SingularSystemError
from diffusion_mp.graph import Graph
from diffusion_mp.models import CertifiedDIFFormer
from diffusion_mp.saving import Saved
from diffusion_mp_experiments.reproduce.networks import (
    ABLATIONS,
    normalized_adjacency,
    without_attention,
)
from diffusion_mp_experiments.reproduce.table import Config, with_arguments
from diffusion_mp_experiments.train.many_runs import versions

#: A LightningDataModule with `num_features`, `num_classes` and `trains`, the LightningModule for its data.
DataModule = Any
#: How many steps of a network at rest have their energy recorded.
STEPS = 30
#: What is measured of every state, with a description for readers; all but the energy are scale-free.
MEASURES = {
    "energy": "energy on the graph, tr Zᵀ(I − Â)Z",
    "roughness": "tr Zᵀ(I − Â)Z / ‖Z‖²",
    "spread": "‖Z − mean‖² / ‖Z‖²",
    "rank": "effective rank",
}
# What a network raises that has diverged: such a run is the worst of its row, other errors end the table.
_DIVERGED = (
    ArithmeticError,
    ConvergenceError,
    SingularSystemError,
    torch.linalg.LinAlgError,  # type: ignore[attr-defined]
)


def train(
    config: Config,
    metric: str,
    split: int,
    seed: int,
    tuning: bool,
    save: Path | None = None,
    device: str = "cpu",
    end: float = math.inf,
) -> Config:
    """Train once and return the result.

    Args:
        config: configuration of the run, as `Table.config` makes it.
        metric: the name under which the module logs the metric.
        split: number of the split of the data module.
        seed: seed of the run; initial weights and dropout are drawn from split and seed.
        tuning: whether the data module serves for tuning; the test metric is then left out.
        save: the file for the trained model, which `diffusion_mp.load` reads. By default the model is not saved.
        device: where a network trains. Predictors that are not networks stay on the CPU.
        end: the time of ``time.monotonic()`` after which no other epoch begins.

    Returns:
        validation and, except for tuning, test metric of the epoch with the best validation score; that epoch, how many
            there were, why no more, and the mean seconds of one; the test metric with the attention of the trained
            model replaced, where it has one; measures of its states (`MEASURES`) and, of a certified one, the energy F
            at every state; hash of the data, versions, seconds and peak memory of the process in MB.
    """
    start = time.perf_counter()
    with suppress(OSError):
        # Linux measures the peak of memory from here on.
        Path("/proc/self/clear_refs").write_text("5")
    with warnings.catch_warnings(), isolate_rng():
        # Said once in every run they would bury the progress of a table.
        warnings.filterwarnings("ignore", module=r"(torch_geometric|torchmetrics)\b")
        warnings.filterwarnings(
            "ignore", message="Sparse CSR tensor support is in beta"
        )
        # No two pairs of split and seed begin with the same weights, for fewer than 1000 seeds.
        seed_everything(1000 * split + seed, workers=True, verbose=False)
        # Predictors compute with NumPy and scikit-learn.
        device = "cpu" if "predictor" in config["module"] else device
        data = data_module(config, split, tuning, device)
        module = build_module(config, data).to(device)
        logged = LastLogged(module)
        result = {}
        network: Any = module.model
        # Refused before the training, which would be in vain.
        if save is not None and not isinstance(network, Saved):
            raise ValueError(
                f"--save writes models of diffusion_mp; got {type(network).__name__}. Leave it out, or make the class "
                "a subclass of GraphModel."
            )
        if "predictor" in config["module"]:
            network.fit(data)
        else:
            result = _fit(
                module, data, logged, config["epochs"], config["patience"], end
            )
        if result.get("epoch") == 0:  # no epoch had a score
            result |= {"validation": None, "test": None, "ablated": {}}
        else:
            result |= _measured(module, data, logged, metric, tuning)
        result["data"] = data_hash(data)
        if save is not None:
            network.save(save)
    return {
        **result,
        "versions": versions(device),
        "seconds": round(time.perf_counter() - start, 3),
        "memory": _peak(),
    }


def build_module(config: Config, data: DataModule) -> LightningModule:
    """Make the LightningModule that trains on `data`, around the model or predictor of the configuration."""
    options = deepcopy(config["module"])
    model = options.pop("model", None) or options.pop("predictor")
    if "model" in config["module"]:
        arguments = model.setdefault("init_args", {})
        widths = {"in_channels": data.num_features, "out_channels": data.num_classes}
        for name, width in widths.items():
            if _takes(model["class_path"], name):
                arguments[name] = width
        if arguments.get("edge_dim") == "data":
            arguments["edge_dim"] = data.num_edge_features
    network = build(nn.Module, model)
    if "attention" in config and not without_attention(network, config["attention"]):
        raise ValueError(
            f"{model['class_path']} has no attention over pairs that could be the {config['attention']}."
        )
    if not hasattr(data, "trains"):
        raise ValueError(
            f"{type(data).__name__} must have the attribute trains, a LightningModule such as NodeClassifier."
        )
    try:
        return type(data).trains(network, **options)
    except TypeError as error:
        raise ValueError(
            f"{type(data).trains.__name__} cannot be made with {options}: {error}"
        ) from error


def _takes(class_path: str, argument: str) -> bool:
    """Return whether the constructor of a class takes an argument, as far as that can be known."""
    try:
        parameters = inspect.signature(locate(class_path)).parameters  # type: ignore[arg-type]
    except (ErrorDuringImport, ValueError, TypeError):
        return True  # the parser says what is wrong
    kinds = {parameter.kind for parameter in parameters.values()}
    return argument in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def build(kind: type, config: Config) -> Any:
    """Make an object from `class_path` and `init_args`, of a class that must be of this kind."""
    # The parser of Lightning's command line, so that a row is read like a configuration of `fit`.
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--it", type=kind)
    try:
        return parser.instantiate(parser.parse_object({"it": config})).it
    except (ArgumentError, TypeError) as error:
        raise ValueError(f"{config} makes no {kind.__name__}: {error}") from error


def data_module(
    config: Config, split: int = 0, tuning: bool = True, device: str = "cpu"
) -> DataModule:
    """Return the data module of the configuration of a run, with its data read."""
    return _data(json.dumps(config["data"], sort_keys=True), split, tuning, device)


@lru_cache(4)
def _data(config: str, split: int, tuning: bool, device: str) -> DataModule:
    options = with_arguments(json.loads(config), split=split, tuning=tuning)
    data = build(LightningDataModule, options)
    data.prepare_data()
    data.setup("fit")
    if device != "cpu":
        data.to(device)
    return data


class LastLogged:
    """Replace a module's `log`, which needs a trainer, and keep the last values."""

    def __init__(self, module: LightningModule) -> None:
        self.values: dict[str, Metric | Tensor] = {}
        module.log = self.log  # type: ignore[method-assign, assignment]

    def log(self, name: str, value: Metric | Tensor, **options: Any) -> None:
        """Keep a value. A plain number is the value of the last batch, so it is right if there is one batch."""
        self.values[name] = value

    def take(self, name: str) -> float:
        if name not in self.values:
            names = ", ".join(sorted(self.values))
            raise ValueError(
                f"The module does not log {name}, but {names}; change the name of metric in table.yaml."
            )
        value = self.values[name]
        number = float(value.compute() if isinstance(value, Metric) else value)
        # A metric that is not reset would count this epoch in the next one too.
        for each in self.values.values():
            if isinstance(each, Metric):
                each.reset()
        return number


def _fit(
    module: Any,
    data: DataModule,
    logged: LastLogged,
    epochs: int,
    patience: int,
    end: float = math.inf,
) -> Config:
    """Train until val_score has not risen for `patience` epochs, and load the weights of the first best epoch.

    This is a plain loop, since Lightning's loop costs as much as a step on a small graph.
    """
    optimizer = module.configure_optimizers()
    batches = data.train_dataloader()
    validation = data.val_dataloader()
    score = -math.inf
    best = 0
    done = 0
    ended = "epochs"
    curve: list[float] = []
    state: dict[str, Tensor] = {}
    start = time.perf_counter()
    try:
        while done < epochs and ended == "epochs":
            module.train()
            for number, batch in enumerate(batches):
                optimizer.zero_grad()
                module.training_step(batch.to(module.device), number).backward()
                optimizer.step()
            _evaluate(module, validation, "val")
            new = logged.take("val_score")
            done += 1
            curve.append(round(new, 4))
            if new > score:
                score = new
                best = done
                state = deepcopy(module.state_dict())
            # NaN is never above a score, so it would only end the patience.
            if not math.isfinite(new):
                ended = "diverged"
            elif done - best >= patience:
                ended = "patience"
            elif time.monotonic() >= end:
                ended = "time"
    except _DIVERGED as error:
        ended = f"diverged: {error}"
    seconds = time.perf_counter() - start
    # Without a finite score there is no best epoch, and nothing to go back to.
    if state:
        module.load_state_dict(state)
    # JSON has no NaN.
    curve = [score for score in curve if math.isfinite(score)]
    return {
        "epoch": best,
        "epochs": done,
        "ended": ended,
        "curve": curve,
        "epoch_seconds": round(seconds / max(1, done), 4),
    }


@torch.no_grad()
def _evaluate(module: Any, batches: Iterable[Any], stage: str) -> None:
    training = module.training
    step = {"val": module.validation_step, "test": module.test_step}[stage]
    module.eval()
    # What a trainer calls around the steps.
    module.on_validation_epoch_start()
    for number, batch in enumerate(batches):
        step(batch, number)
    if stage == "val":
        module.on_validation_epoch_end()
    module.train(training)


def _measured(
    module: Any, data: DataModule, logged: LastLogged, metric: str, tuning: bool
) -> Config:
    def value(stage: str) -> float | None:
        try:
            _evaluate(module, getattr(data, f"{stage}_dataloader")(), stage)
        except _DIVERGED:
            return None
        number = logged.take(f"{stage}_{metric}")
        return number if math.isfinite(number) else None

    if tuning:
        return {"validation": value(getattr(data, "tuned_on", "val"))}
    result: Config = {"validation": value("val")}
    trained: Any = module.model
    with measured(trained) as states:
        result["test"] = value("test")
    result["states"] = {
        name: [round(each, 6) for each in values]
        for name, values in states.items()
        if values
    }
    if isinstance(trained, CertifiedDIFFormer) and states["energy"]:
        # A network at rest has no number of steps: the first ones.
        steps = trained.conv.num_layers
        trained.conv.num_layers = steps or STEPS
        energies = trained.energies(data.data.x, data.data.edge_index)
        result["states"]["F"] = energies.tolist()
        trained.conv.num_layers = steps
    result["ablated"] = {}
    # The scores of a predictor are fixed.
    for ablation in () if hasattr(trained, "fit") else ABLATIONS:
        # A copy, since the trained model may be saved afterwards.
        module.model = model = deepcopy(trained)
        if without_attention(model, ablation):
            result["ablated"][ablation] = value("test")
    module.model = trained
    return result


@contextmanager
def measured(model: nn.Module) -> Iterator[dict[str, list[float]]]:
    """Measure the states of the first pass on a single graph: before any diffusion layer, then after each.

    A state is measured as the next layer reads it, normalised and activated, and the last one as its layer returns it.
    """
    values: dict[str, list[float]] = {name: [] for name in MEASURES}
    states: list[tuple[Tensor, Graph]] = []

    def look(name: str, x: Any, graph: Any, out: Any) -> None:
        if (
            isinstance(graph, Graph)
            and graph.segments is None
            and x.layout is torch.strided
        ):
            if isinstance(out, tuple):
                out = out[0]
            # The input of a layer replaces the output of the one before.
            states[-1:] = [(x, graph), (out, graph)]

    def end(*_: Any) -> None:
        # Only of the first pass: an evaluation may take several.
        if not values["energy"]:
            for state, graph in states:
                for name, value in state_measures(state, graph).items():
                    values[name].append(value)
        states.clear()

    # A pass ends with the output of the model itself.
    handle = model.register_forward_hook(end)
    try:
        with hooked(declared(model, "is_diffusion_layer"), look):
            yield values
    finally:
        handle.remove()


@torch.no_grad()
def state_measures(x: Tensor, graph: Graph) -> dict[str, float]:
    """Return `MEASURES` of one state [N, …] on a graph; Â is the symmetric normalised adjacency with self-loops."""
    z = x.detach().flatten(1).double()
    square = float(z.square().sum())
    adjacency = normalized_adjacency()(z, graph)
    energy = square - float((z * adjacency.matmul(z.unsqueeze(1)).squeeze(1)).sum())
    # Squares of the singular values, from the small matrix of channels.
    share = torch.linalg.eigvalsh(z.T @ z).clamp(min=0)
    share = share / share.sum().clamp(min=torch.finfo(share.dtype).tiny)
    rank = float(torch.special.entr(share).sum().exp())
    # A state of zeros is neither rough nor spread.
    size = square or math.inf
    return {
        "energy": energy,
        "roughness": energy / size,
        "spread": float((z - z.mean(0)).square().sum()) / size,
        "rank": rank,
    }


def data_hash(data: DataModule) -> str:
    """Hash everything that validates and tests, masks included, to twelve hexadecimal digits."""
    # Many runs share the data, which `_data` keeps.
    if not hasattr(data, "_hash"):
        digest = hashlib.sha256()
        for loader in (data.val_dataloader(), data.test_dataloader()):
            for tensor in _tensors(list(loader)):
                digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
                digest.update(tensor.contiguous().numpy().tobytes())
        data._hash = digest.hexdigest()[:12]
    return data._hash


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor) and batch.layout is torch.strided:
        yield batch.detach().cpu()
    elif isinstance(batch, Tensor):
        batch = batch.to_sparse_csr()
        yield from _tensors([batch.crow_indices(), batch.col_indices(), batch.values()])
    elif isinstance(batch, Data):
        yield from _tensors([value for _, value in sorted(batch.to_dict().items())])
    elif isinstance(batch, (list, tuple)):
        for part in batch:
            yield from _tensors(part)


def _peak() -> int:
    """Return the most memory of this process at once, in MB: on Linux since the run began."""
    status = Path("/proc/self/status")
    # VmHWM begins anew with every run (see `train`), ru_maxrss does not.
    if status.is_file():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) // 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
