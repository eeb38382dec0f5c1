"""Every model: explainers, threads, sparse features, channels found at the first call, gradients, certificates."""

import copy
import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks
from torch_geometric.nn import summary

from diffusion_mp import CertifiedDIFFormer, PDETransformer, SGFormer, certify
from diffusion_mp.couplings import Coupling
from helpers import built, refuses
from model_cases import MODELS, Case

READ_FEATURES = [
    name for name, case in MODELS.items() if {"x", "edge_index"} <= set(case.names)
]
READ_EDGES = [name for name in READ_FEATURES if name != "mlp"]
LAYOUTS = {
    kind: getattr(torch.Tensor, f"to_sparse_{kind}") for kind in ("csr", "csc", "coo")
}
LAYOUTS["uncoalesced"] = lambda x: twice(x.to_sparse_coo())


def results(model: nn.Module, inputs) -> list[Tensor]:
    """The output, and the gradient of every parameter."""
    out = model(**inputs)
    leaves = [leaf for leaf in model.parameters() if leaf.requires_grad]
    slopes = torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True)
    return [out.detach(), *slopes]


def explained(model: nn.Module, algorithm, **inputs: Tensor) -> Tensor:
    config = {"mode": "regression", "task_level": "graph", "return_type": "raw"}
    explainer = Explainer(
        model,
        algorithm,
        explanation_type="model",
        edge_mask_type="object",
        model_config=config,
    )
    return explainer(**inputs).edge_mask


@pytest.mark.parametrize("name", READ_EDGES)
def test_the_edges_of_a_model_are_explained(name: str) -> None:
    """By a learned mask; and by attention, which is the largest entry of any coupling at the observed edges."""
    case = MODELS[name]
    model = case.model().eval()
    inputs = case.inputs(12)
    before = model(**inputs)
    mask = explained(model, GNNExplainer(epochs=2), **inputs)
    assert mask.shape == inputs["edge_index"].shape[1:]
    assert mask.unique().numel() > 2
    assert torch.equal(model(**inputs), before)
    mask = explained(model, AttentionExplainer("max"), **inputs)
    _, couplings = model(**inputs, return_coupling=True)
    # Whose couplings are those of its attention; the explainer hears its GNN too.
    if isinstance(model, SGFormer):
        initial = (model.gnn_encoder or model.encoder)(inputs["x"])
        couplings += model.gnn(initial, inputs["edge_index"], return_coupling=True)[1]
    entries = [coupling.at(inputs["edge_index"]).amax(1) for coupling in couplings]
    torch.testing.assert_close(mask, torch.stack(entries).amax(0))
    assert not model.edge_mask._message_forward_hooks


@pytest.mark.parametrize("name", ["gcn", "gps", "certified-options"])
def test_a_mask_is_a_weight_of_the_edges(name: str) -> None:
    case = MODELS[name]
    model = case.model().eval()
    inputs = case.inputs(12)
    mask = torch.rand(
        inputs["edge_index"].size(1), generator=torch.Generator().manual_seed(0)
    )
    expected = model(**inputs, edge_weight=mask)
    assert not torch.allclose(model(**inputs), expected)
    for logits, sigmoid in ((mask, False), (mask.logit(), True)):
        set_masks(model, logits, inputs["edge_index"], apply_sigmoid=sigmoid)
        torch.testing.assert_close(model(**inputs), expected)
        clear_masks(model)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_summarised_and_answers_for_its_energy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyG draws the table with another package, which need not be there; a certificate needs no data."""
    monkeypatch.setitem(
        sys.modules, "tabulate", SimpleNamespace(tabulate=lambda rows, **_: str(rows))
    )
    case = MODELS[name]
    model = case.model().eval()
    assert type(model).__name__ in summary(model, **case.inputs(12))
    certificate = certify(case.model())
    assert certificate.holds == name.startswith("certified")
    assert len(str(certificate)) > 40


@pytest.mark.parametrize("name", READ_FEATURES)
def test_every_parameter_learns(name: str) -> None:
    case = MODELS[name]
    model = case.model().train()
    model(**case.inputs(12)).pow(3).sum().backward()
    for key, parameter in model.named_parameters():
        # The last edge states are not read.
        if not (key.startswith("blocks.1") and "edge_norm" in key):
            assert parameter.grad is not None, key
            assert parameter.grad.abs().max() > 0, key


@pytest.mark.parametrize(
    "name",
    [
        "difformer-options",
        "difformer-sigmoid",
        "sgformer",
        "sfi-former",
        "gat",
        "pde-transformer",
    ],
)
def test_threads_that_share_a_model_do_not_meddle(name: str) -> None:
    case = MODELS[name]
    model = case.model().train()
    calls = [case.inputs(size) for size in range(12, 22)]
    alone = [results(model, inputs) for inputs in calls]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda inputs: results(model, inputs), calls))
    torch.testing.assert_close(together, alone, rtol=0, atol=0)


@pytest.fixture
def _only_what_the_test_makes():
    """Objects of other tests are left out of collections, which take half a second each otherwise."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_only_what_the_test_makes")
@pytest.mark.parametrize(
    "name", ["difformer", "nodeformer", "sgformer", "gcn", "sfi-former"]
)
def test_a_coupling_is_kept_only_if_it_is_returned(name: str) -> None:
    case = MODELS[name]
    model = case.model()
    made: list[weakref.ref] = []
    alive: list[int] = []

    def couple(module: nn.Module, args, coupling: Coupling) -> None:
        made.append(weakref.ref(coupling))

    def count(*_) -> None:
        gc.collect()
        alive.append(sum(coupling() is not None for coupling in made))

    if name == "sfi-former":
        layers = model.blocks
        couplers = [block.attention for block in layers]
    else:
        layers = couplers = (model.gnn if name == "sgformer" else model).convs
    for layer, coupler in zip(layers, couplers, strict=True):
        coupler.diffusivity.register_forward_hook(couple)
        layer.register_forward_hook(count)
    with torch.no_grad():
        model(**case.inputs(12))
        count()
        assert alive == [0] * (len(layers) + 1)
        made.clear()
        alive.clear()
        _, couplings = model(**case.inputs(12), return_coupling=True)
    assert len(made) == len(layers)
    # Those of its attention are returned, not those of its GNN.
    if name != "sgformer":
        assert len(couplings) == len(layers)
        assert alive == list(range(1, len(layers) + 1))


def twice(x: Tensor) -> Tensor:
    indices = x.coalesce().indices()
    values = x.coalesce().values()
    halves = torch.cat([indices, indices], 1), torch.cat([values, values]) / 2
    return torch.sparse_coo_tensor(*halves, x.shape, check_invariants=False)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [name for name in READ_FEATURES if name != "gin"])
def test_sparse_features_give_what_dense_ones_give(name: str, layout: str) -> None:
    case = MODELS[name]
    model = case.model().eval()
    inputs = case.inputs(12)
    x = inputs["x"].where(inputs["x"] > 0.8, 0.0)
    x[6] = 0
    x[:, 5] = 0
    got, expected = (
        results(model, inputs | {"x": each}) for each in (LAYOUTS[layout](x), x)
    )
    torch.testing.assert_close(got, expected)


def lazy(case: Case, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """The model built with -1 channels."""
    cls = type(case.model())
    init = cls.__init__

    def unknown(self: nn.Module, channels: int, *args, **options) -> None:
        channels = -1 if type(self) is cls and channels == 8 else channels
        init(self, channels, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(cls, "__init__", unknown)
        return case.model()


@pytest.mark.parametrize("name", READ_FEATURES)
def test_a_model_finds_its_channels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = MODELS[name]
    expected = case.model().eval()
    inputs = case.inputs(12)
    narrow = inputs | {"x": inputs["x"][:, :5]}
    sparse = inputs | {"x": inputs["x"].to_sparse_csr()}
    model = lazy(case, monkeypatch).double().eval()
    assert any(map(is_lazy, model.parameters()))
    loaded = copy.deepcopy(model)
    model.reset_parameters()
    model.float()(**inputs if name == "gin" else sparse)
    assert model.in_channels == 8
    assert not any(map(is_lazy, model.parameters()))
    # A model with known channels has the same names and numbers.
    for each in (model, expected):
        built(each.reset_parameters)
    torch.testing.assert_close(model.state_dict(), expected.state_dict())
    # Weights that are loaded before the first call determine the channels.
    loaded.load_state_dict(expected.state_dict())
    for each, words in (
        (loaded.float(), r"x must have 8 channels|\[num_nodes, 8\]|\[8, 8\]"),
        (model, "x must have 8 channels"),
    ):
        with pytest.raises(ValueError, match=words):
            each(**narrow)
    torch.testing.assert_close(loaded(**inputs), expected(**inputs))


test_channels_that_are_not_found_later = refuses(
    (
        lambda: PDETransformer(-1, 8, 3, max_length=5),
        r"in_channels must be at least 1; got -1\. Only what begins with one linear map",
    ),
    (
        lambda: CertifiedDIFFormer(-1, 8, 3).certificate(),
        r"x must be given, or the model called once",
    ),
    error=ValueError,
)


def test_a_certificate_finds_the_channels() -> None:
    model = CertifiedDIFFormer(-1, 8, 3)
    assert model.certificate(torch.randn(5, 4), torch.tensor([[0, 1], [1, 0]])).holds
    assert model.in_channels == 4
