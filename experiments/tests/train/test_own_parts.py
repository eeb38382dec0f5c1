"""Models, data, callbacks and loggers of users in `diffusion-mp fit`: they work, or are refused in a sentence."""

import re

import pytest
import torch
import yaml

import own_parts
from diffusion_mp_experiments.train import (
    DigitsDataModule,
    NodeClassifier,
    load_checkpoint,
)
from training_runs import CONFIG, TINY

SHORT = "--trainer.max_epochs=1 --trainer.enable_progress_bar=false"
QUIET = f"{SHORT} --trainer.logger=false"
MODELS = {
    "own_parts.FeaturesOnly": "FeaturesOnly cannot be called with a float32 tensor .* too many positional arguments",
    "own_parts.TwoResults": r"The model must return a tensor of outputs; got \(a float32 tensor",
    "own_parts.OneNumber": r"The model returned \[\] for 8 nodes; it must return one row of logits per node",
    "torch.nn.Identity": "optimizer got an empty parameter list",
}
MASK = (
    r"must be a tensor with True or False for each of 8 nodes, or indices of nodes; got"
)
DATA = {
    "NoTrainMask": "data has no train_mask, which says which nodes to use. Split.apply_to",
    "NoValMask": "data has no val_mask",
    "NoTestMask": "data has no test_mask",
    "ListMask": rf"data.train_mask {MASK} \[True",
    "FloatMask": f"data.train_mask {MASK} a float32 tensor",
    "WideMask": f"data.train_mask {MASK} a bool tensor",
    "ShortMask": f"data.train_mask {MASK} a bool tensor",
    "NoLabels": "data.y must be a tensor of labels, .* got None",
    "FloatLabels": "target must hold class numbers",
    "FewLabels": "data.y must have a row for each of 8 nodes; got an int64 tensor",
    "NoFeatures": "data must have x, the features",
    "Pairs": "data must be a torch_geometric Data; got",
    "TextWidth": r"TextWidth\.num_features must be a whole number; got '3'",
    "Unmeasured": "Give the data module the properties num_features and num_classes",
    "NoWidth": r"NoWidth\.num_features must be a whole number; got None",
}


@pytest.fixture
def fit(tmp_path, typed):
    """Fits a model on data of `own_parts`; returns what was said."""

    def run(model="own_parts.Linear", data="Ring", options="", code=0):
        parts = f"--data=own_parts.{data} --model.model={model} --out={tmp_path}"
        return typed(f"fit {parts} {QUIET} {options}", code=code)

    return run


@pytest.mark.parametrize(("model", "sentence"), MODELS.items())
def test_models_that_do_not_fit_are_refused(model, sentence, fit):
    assert re.search(sentence, fit(model, code=2))


@pytest.mark.parametrize(("data", "sentence"), DATA.items())
def test_data_that_do_not_fit_are_refused(data, sentence, fit):
    assert re.search(sentence, fit(data=data, code=2))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("own_parts.WithoutArguments", ""),
        (
            "own_parts.OtherNames",
            "--model.model.features=3 --model.model.classes=2",
        ),
        (
            "torch_geometric.nn.GCN",
            "--model.model.hidden_channels=4 --model.model.num_layers=2",
        ),
    ],
)
def test_models_with_other_arguments_train(model, options, fit):
    fit(model, options=options)


def test_masks_may_be_indices(fit):
    fit(data="Indices")
    (data,) = own_parts.Indices().train_dataloader()
    module = NodeClassifier(own_parts.Linear(3, 2))
    logits, labels = module.compared(data, "train")
    assert torch.equal(logits, module(data)[:3])
    assert labels.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("64-true", torch.float64),
        ("32-true", torch.float32),
        ("bf16-true", torch.bfloat16),
        ("16-true", torch.float16),
        ("16-mixed", torch.float32),
        ("bf16-mixed", torch.float32),
    ],
)
def test_every_precision_of_the_trainer_trains(precision, dtype, tmp_path, typed):
    options = f"{QUIET} --out={tmp_path} --trainer.precision={precision}"
    typed(f"fit --config {CONFIG} {options}", *TINY)
    (last,) = tmp_path.rglob("last.ckpt")
    state = load_checkpoint(last)["state_dict"]
    assert {value.dtype for value in state.values() if value.is_floating_point()} == {
        dtype
    }


def test_data_that_have_the_dtype_of_the_model_stay_the_same_object():
    data = DigitsDataModule().data
    module = NodeClassifier(own_parts.Linear(64, 10))
    assert module.in_dtype(data) is data
    double = module.double().in_dtype(data)
    assert (double.x.dtype, data.x.dtype, double.train_mask.dtype) == (
        torch.float64,
        torch.float32,
        torch.bool,
    )
    assert double.edge_index is data.edge_index


CALLBACKS = {
    "StochasticWeightAveraging": ["swa_lrs=0.01"],
    "ModelPruning": ["pruning_fn=l1_unstructured", "amount=0.1"],
    "LearningRateMonitor": [],
    "EarlyStopping": ["monitor=val_loss"],
    "ModelCheckpoint": ["monitor=val_loss"],
    "DeviceStatsMonitor": [],
    "ModelSummary": [],
    "LambdaCallback": [],
    "EMAWeightAveraging": [],
    "GradientAccumulationScheduler": ['scheduling={"0": 2}'],
    "OnExceptionCheckpoint": ["dirpath=here"],
    "LearningRateFinder": [],
}
LOGGERS = {"CSVLogger": ["save_dir=here"], "TensorBoardLogger": ["save_dir=here"]}


@pytest.mark.parametrize(
    ("part", "name", "options"),
    [
        *(("callbacks", *each) for each in CALLBACKS.items()),
        *(("logger", *each) for each in LOGGERS.items()),
    ],
)
def test_the_configuration_of_a_run_can_be_read_back(
    part, name, options, tmp_path, typed
):
    """Callbacks whose defaults are objects have no text of their own for them."""
    words = [f"--trainer.{part}={name}"]
    words += [f"--trainer.{part}.{each}" for each in options]
    typed(f"fit --config {CONFIG} {SHORT}", *TINY, *words)
    (written,) = tmp_path.rglob("config.yaml")
    text = written.read_text()
    assert "Unable to serialize" not in text
    assert text.startswith("# pytorch_lightning==")
    assert name in text
    read = typed(f"fit --config {written} --print_config")
    assert yaml.safe_load(read) == yaml.safe_load(text)
    typed(f"fit --config {written} --out again")


def test_a_precision_whose_package_is_missing_is_a_sentence(fit, monkeypatch):
    monkeypatch.setattr(
        "lightning_fabric.plugins.precision.transformer_engine._TRANSFORMER_ENGINE_AVAILABLE",
        False,
    )
    said = fit(options="--trainer.precision=transformer-engine", code=2)
    assert "The trainer needs a package that is not installed: " in said
