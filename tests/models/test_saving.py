"""What is saved loads as it was; what a file claims runs nothing and takes no memory; the zoo keeps its word."""

import json
import os
import re
import resource
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import diffusion_mp as dm
from diffusion_mp.diffusivities import Positive
from diffusion_mp.energies import Ball, Penalty, SimplePenalty
from diffusion_mp.saving import Described
from diffusion_mp.updates import ExplicitEuler
from helpers import built
from model_cases import MODELS, graphs

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("fixed_seed")


def reloaded(model: nn.Module, path: Path, **options) -> nn.Module:
    model.save(path / "model.safetensors")
    return dm.load(path / "model.safetensors", **options)


def same(model: nn.Module, other: nn.Module) -> None:
    states = dict(model.state_dict()), dict(other.state_dict())
    assert [*states[0]] == [*states[1]]
    torch.testing.assert_close(*states, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_model_answers_bit_for_bit(name, tmp_path):
    case = MODELS[name]
    model = case.model().train()
    state = torch.get_rng_state()
    loaded = reloaded(model, tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert not any(module.training for module in loaded.modules())
    assert (type(loaded), repr(loaded)) == (type(model), repr(model))
    same(model, loaded)
    inputs = case.inputs(24)
    assert torch.equal(model.eval()(**inputs), loaded(**inputs))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_objects_among_the_arguments(tmp_path):
    tau = nn.Parameter(torch.tensor(0.25))
    kernel = dm.GaussianDiffusivity(
        bandwidth=0.3, normalize=None, measure="distance", row_stochastic=False
    )
    inputs = 0.5 * dm.SymmetricDiffusivity(kernel)
    models = [
        dm.DIFFormer(8, 6, 3, update=ExplicitEuler(tau, beta=1.0), source=True),
        dm.DIFFormer(8, 6, 3, tau=torch.tensor(0.125), transform=True),
        dm.CertifiedDIFFormer(
            8,
            6,
            3,
            2,
            penalty=dm.MixturePenalty((0.5, 1.0)),
            constraint=Ball(2.0),
            inputs=inputs,
        ),
        dm.PDETransformer(
            [9], 8, 3, 1, 2, max_length=9, placement="P1", diffusion={"strides": (1, 2)}
        ),
        dm.DiffusionConv(
            8,
            3,
            dm.IdentityDiffusivity() + dm.SigmoidDiffusivity(),
            ExplicitEuler(Positive(0.5)),
        ),
    ]
    for model in models:
        for parameter in model.parameters():
            parameter.data += 0.01
        loaded = reloaded(model, tmp_path)
        same(model, loaded)
        assert repr(loaded) == repr(model)


def test_what_is_shared_stays_shared(tmp_path):
    part = dm.SimpleDiffusivity(8, projection="tied", row_stochastic=False)
    scale = nn.Parameter(torch.tensor(0.5))
    conv = dm.DiffusionConv(8, 8, scale * part + scale * dm.SymmetricDiffusivity(part))
    loaded = reloaded(conv, tmp_path)
    assert len([*loaded.parameters()]) == len([*conv.parameters()])
    same(conv, loaded)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, None])
def test_the_dtype_is_kept(dtype, tmp_path):
    model = dm.DiffusionGNN(8, 6, 3, norm="batch", conv="gcn").to(
        dtype or torch.float32
    )
    if dtype is None:
        model.convs[0].double()
    same(model, reloaded(model, tmp_path))


def test_channels_of_the_first_call(tmp_path):
    model = dm.DIFFormer(-1, 6, 3)
    inputs = graphs(12)
    with pytest.raises(
        ValueError, match=r"no values for encoder\.weight before its first call"
    ):
        model.save(tmp_path / "model.safetensors")
    model.double()(inputs["x"].double(), inputs["edge_index"])
    loaded = reloaded(model, tmp_path)
    same(model, loaded)
    with pytest.raises(ValueError, match="8 channels"):
        loaded(inputs["x"][:, :5].double(), inputs["edge_index"])


class Mine(dm.DIFFormer):
    def __init__(self, channels: int, penalty: Penalty | None = None) -> None:
        super().__init__(channels, 4, 2)
        self.penalty = penalty
        self.extra = nn.Linear(channels, 1)


class MyPenalty(SimplePenalty):
    pass


class PlainPenalty(Penalty):
    """Without fields: its class says all."""

    def delta(self, z2: Tensor) -> Tensor:
        return 2 * z2

    def f(self, z2: Tensor) -> Tensor:
        return torch.full_like(z2, 2.0)


def test_own_classes_are_named(tmp_path):
    model = Mine(5, MyPenalty())
    with pytest.raises(
        ValueError,
        match=r"no class 'MyPenalty'. If it is your own, pass load\(path, classes=\[My",
    ):
        reloaded(model, tmp_path)
    loaded = reloaded(model, tmp_path, classes=[Mine, MyPenalty])
    assert (type(loaded), type(loaded.penalty)) == (Mine, MyPenalty)
    loaded = reloaded(Mine(5, PlainPenalty()), tmp_path, classes=[Mine, PlainPenalty])
    assert type(loaded.penalty) is PlainPenalty
    with pytest.raises(TypeError, match="classes must be subclasses"):
        dm.load(tmp_path / "model.safetensors", classes=[nn.Linear])
    other = type("GPS", (dm.DIFFormer,), {"__module__": "elsewhere"})(8, 4, 2)
    with pytest.raises(ValueError, match="another class has its name"):
        other.save(tmp_path / "other")


SEQUENTIAL = nn.Sequential(nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: dm.PenaltyDiffusivity(dm.FunctionPenalty(lambda s: 1 / (1 + s))),
            "cannot be saved as an arg",
        ),
        (lambda: dm.GINConv(4, SEQUENTIAL), r"a module \(Sequential\) cannot"),
        (lambda: changed(dm.DIFFormer(4, 4, 2)), "changed after it was built"),
        (lambda: dm.LabelPropagation(2_000_000), "more than the tensors account for"),
    ],
)
def test_what_a_file_cannot_hold_is_refused(build, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        build().save(tmp_path / "model.safetensors")
    assert not [*tmp_path.iterdir()]


def changed(model: dm.DIFFormer) -> dm.DIFFormer:
    model.decoder = nn.Linear(4, 9)
    return model


def written(path: Path, about: object = None, state: dict | None = None) -> Path:
    """A file as `save` writes it, with another description or other tensors."""
    model = built(lambda: dm.DIFFormer(4, 4, 2))
    if isinstance(about, dict):
        arguments = {"in_channels": 4, "hidden_channels": 4, "out_channels": 2}
        about = {"$class": "DIFFormer"} | arguments | about
    content = json.dumps({"format": 1, "model": about})
    save_file({**model.state_dict(), **(state or {})}, path, {"diffusion_mp": content})
    return path


CLASSES = (
    "os.system",
    "subprocess.Popen",
    "torch.load",
    "torch.nn.Linear",
    "eval",
    "_ThetaStep",
)
CLAIMS = {
    **{name: ({"$class": name}, f"there is no class '{name}'") for name in CLASSES},
    "no model": ({"$class": "Ball", "radius": 1.0}, "unexpected keyword argument"),
    "nothing": (None, "it is no module"),
    "an argument too many": ({"hidden": 3}, "takes no hidden"),
    "an argument of another kind": ({"dropout": "high"}, "dropout must be a number"),
    "wide": ({"hidden_channels": 10**6}, "of another shape"),
    "too wide": ({"hidden_channels": 10**12}, "more than the tensors account for"),
    "too deep": ({"num_layers": 10**9}, "more than the tensors account for"),
    "many layers": ({"num_layers": 10**6}, "more parts than"),
    "an object that was not made": (
        {"tau": {"$class": "again", "number": 7}},
        "cannot be built",
    ),
    "an abstract class": ({"$class": "GraphModel"}, "abstract"),
    "code": (
        {"tau": {"$class": "tensor", "data": 1.0, "dtype": "load"}},
        "cannot be built",
    ),
}


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize("claim", CLAIMS)
def test_claims_are_refused_in_no_memory(claim, tmp_path):
    about, words = CLAIMS[claim]
    path = written(tmp_path / "model.safetensors", about)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=words) as refused:
        dm.load(path)
    assert str(path) in str(refused.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kB


def header(content: object) -> bytes:
    text = json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text


HUGE = {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}


def about(text: str) -> bytes:
    return header({"__metadata__": {"diffusion_mp": text}})


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize(
    ("blob", "words"),
    [
        (b"", "is no safetensors file"),
        (b"PK\x03\x04" * 20, "is no safetensors file"),
        (struct.pack("<Q", 1 << 62), "is no safetensors file"),
        (header(HUGE), "is no safetensors file"),
        (header({}), "was not written by save"),
        (about("[" * 100_000), "cannot be built: maximum recursion"),
        (about('{"format": 1}'), "cannot be built: 'model'"),
        (about('{"format": 2, "model": {}}'), "has format 2"),
    ],
)
def test_damaged_files_are_named(blob, words, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(blob)
    with pytest.raises(ValueError, match=words) as refused:
        dm.load(path)
    assert str(path) in str(refused.value)


INTEGERS = torch.zeros(2, dtype=torch.int64)


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize(
    ("about", "state", "words"),
    [
        ({}, {"decoder.bias": torch.zeros(3)}, "has 'decoder.bias' of another shape"),
        ({}, {"decoder.bias": INTEGERS}, "or type than an int64 tensor"),
        ({}, {"more": torch.zeros(1)}, "has no 'more'"),
        ({"transform": True}, {}, r"has 'convs\.0\.value\.weight', which is missing"),
    ],
)
def test_tensors_that_do_not_fit_are_named(about, state, words, tmp_path):
    path = written(tmp_path / "model.safetensors", about, state)
    with pytest.raises(ValueError, match=words):
        dm.load(path)


@pytest.mark.usefixtures("no_typecheck")
def test_a_path_that_leads_nowhere(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file"):
        dm.load(tmp_path / "nothing")
    with pytest.raises(TypeError, match="path must be"):
        dm.load(3)
    with pytest.raises(FileNotFoundError, match="no folder"):
        dm.DIFFormer(4, 4, 2).save(tmp_path / "missing" / "model.safetensors")


def test_every_public_module_can_be_named() -> None:
    named = {name for name in dm.__all__ if isinstance(getattr(dm, name), type)}
    modules = {
        name for name in named if issubclass(getattr(dm, name), (nn.Module, Penalty))
    }
    assert modules <= Described.classes.keys()
    assert all(Described.classes[name] is getattr(dm, name) for name in modules)


def test_a_folder_of_the_hub(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    model = dm.DIFFormer(4, 4, 2)
    model.save_pretrained(tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
    }
    same(model, dm.DIFFormer.from_pretrained(tmp_path / "model"))
    with pytest.raises(ValueError, match="holds a DIFFormer, and GPS was asked for"):
        dm.GPS.from_pretrained(str(tmp_path / "model"))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", os.fspath(tmp_path))
    for call in (
        lambda: model.push_to_hub("nobody/nothing"),
        lambda: dm.DIFFormer.from_pretrained("nobody/nothing"),
    ):
        with pytest.raises(
            ConnectionError,
            match="nobody/nothing could not be reached on the Hugging Face Hub",
        ):
            call()


ZOO = {"digits": None, "cora": "Planetoid", "synmol": "SynMol"}


@pytest.mark.parametrize("name", ZOO)
def test_a_model_of_the_zoo_is_small(name):
    path = ROOT / "zoo" / f"{name}.safetensors"
    assert path.stat().st_size <= 200_000
    assert dm.certify(dm.load(path))


@pytest.mark.data
@pytest.mark.parametrize("name", ZOO)
def test_the_score_of_a_card_is_that_of_its_model(name, data_root):
    from diffusion_mp_experiments.reproduce import training
    from diffusion_mp_experiments.reproduce.table import find_table, load_table

    folder = None if ZOO[name] is None else str(data_root / ZOO[name])
    table = load_table(find_table(f"zoo_{name}"), folder)
    config = table.config(table.row(name), {})
    data = training._data(json.dumps(config["data"], sort_keys=True), 0, False, "cpu")
    module = training.build_module(config, data)
    module.model = dm.load(ROOT / "zoo" / f"{name}.safetensors")
    logged = training.LastLogged(module)
    training._evaluate(module, data.test_dataloader(), "test")
    metric = table.metric
    score = metric.scale * logged.take(f"test_{metric.name}")
    card = (ROOT / "zoo" / f"{name}.md").read_text()
    printed = re.search(r", test \| ([\d.]+)", card)
    assert f"{score:.{metric.digits}f}" == printed[1]
