"""A step size that is learned, and steps that are told the state before."""

import pytest
import torch
from dense_updates import DOUBLE, random
from torch import Tensor, nn

import diffusion_mp as dm
from diffusion_mp.couplings import Coupling
from diffusion_mp.testing import assert_energy_descent, random_problem

EDGES = torch.tensor([[0, 1, 2, 3, 5, 1], [1, 0, 3, 2, 4, 2]])


@pytest.mark.parametrize("form", ["conservative", "residual"])
@pytest.mark.parametrize("kind", ["parameter", "tensor", "positive"])
def test_a_learned_step_is_the_step_of_that_size_and_has_its_gradient(form, kind: str) -> None:
    problem = random_problem(9, form)
    number = torch.tensor(0.3, dtype=DOUBLE)
    positive = dm.diffusivities.Positive(0.3).double()
    positive.reset_parameters()  # in double from the start
    tau = {"parameter": nn.Parameter(number), "tensor": number, "positive": positive}[kind]
    learned, plain = (dm.ExplicitEuler(size, form, beta=0.7, leak=0.2) for size in (tau, 0.3))
    x, values, source = (random(9, 2, 3, seed=seed).requires_grad_() for seed in range(3))
    outs = [update(x, problem.coupling, values, source) for update in (learned, plain)]
    torch.testing.assert_close(*outs, rtol=1e-10, atol=1e-12)
    got, expected = (torch.autograd.grad(out.square().sum(), [x, values, source]) for out in outs)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    if kind != "tensor":
        learned(x, problem.coupling, values, source).square().sum().backward()
        (gradient,) = [parameter.grad for parameter in learned.parameters()]
        steps = (dm.ExplicitEuler(0.3 + h, form, beta=0.7, leak=0.2) for h in (1e-5, -1e-5))
        higher, lower = (step(x, problem.coupling, values, source).square().sum() for step in steps)
        by_tau = (higher - lower) / 2e-5
        chain = torch.sigmoid(tau.raw) if kind == "positive" else 1.0
        torch.testing.assert_close(gradient, by_tau * chain, rtol=1e-7, atol=1e-7)


def test_it_is_saved_moved_reset_and_named() -> None:
    conv = dm.DIFFormerConv(4, 4, tau=nn.Parameter(torch.tensor(0.25)), transform=False, bias=False)
    assert conv.state_dict()["update.tau"].item() == 0.25
    with torch.no_grad():
        conv.update.tau.fill_(2.0)
    conv.reset_parameters()
    assert conv.state_dict()["update.tau"].item() == 0.25
    assert "tau=learned" in repr(conv)
    assert conv.double().update.tau.dtype == DOUBLE
    assert "tau=" not in repr(dm.ExplicitEuler(dm.diffusivities.Positive(0.5)).extra_repr())
    assert conv.half()(random(5, 4).half()).dtype == torch.float16
    assert dict(dm.ExplicitEuler(torch.tensor(0.5)).named_buffers()).keys() == {"tau"}
    assert_energy_descent(dm.ExplicitEuler(nn.Parameter(torch.tensor(0.5))), instances=1, steps=2)


def test_a_layer_of_many_steps_tells_the_state_before() -> None:
    x = random(6, 4)
    graph = dm.Graph(6, EDGES).to_undirected()
    adjacency = dm.AdjacencyDiffusivity("sum")
    options = {"transform": False, "bias": False}
    cases = (
        (dm.MomentumStep(0.1, 0.6, steps=1), 7),
        (dm.MomentumStep(0.1, 0.6, steps=7), 1),
        (dm.ExplicitEuler(0.1), 7),
    )
    many, once, still = (
        dm.DiffusionConv(4, 4, adjacency, step, steps=n, **options) for step, n in cases
    )
    torch.testing.assert_close(many(x, graph), once(x, graph), rtol=1e-12, atol=1e-13)
    assert (many(x, graph) - still(x, graph)).abs().max() > 0.01


def test_the_layers_of_a_model_tell_the_state_before() -> None:
    torch.manual_seed(0)
    update = dm.MomentumStep(0.2, 0.5, steps=1, form="residual")
    model = dm.DIFFormer(4, 6, 3, 5, layer_norm=False, update=update).double()
    x = random(6, 4)
    graph = dm.Graph(6, EDGES)
    state = previous = model.encoder(x).relu()
    for conv in model.convs:
        s = conv.diffusivity(state, graph).to_dense()[0]
        state, previous = state - 0.2 * (state - s @ state) + 0.5 * (state - previous), state
    torch.testing.assert_close(model(x, graph), model.decoder(state), rtol=1e-10, atol=1e-11)


@pytest.mark.usefixtures("no_typecheck")
def test_the_state_before_goes_to_those_that_look_at_it() -> None:
    x = random(6, 4)
    conv = dm.DiffusionConv(4, 4, dm.SimpleDiffusivity()).double()
    with pytest.raises(ValueError, match="previous is for updates of two steps"):
        conv(x, previous=x)
    step = dm.MomentumStep(0.1, 0.5, steps=1)
    momentum = dm.DiffusionConv(4, 4, dm.SimpleDiffusivity(), step, transform=False, bias=False)
    still = momentum(x)
    moving = momentum(x, previous=x - 1)
    torch.testing.assert_close(moving, still + 0.5)
    with pytest.raises(ValueError, match="previous must have 4 channels"):
        momentum(x, previous=x[:, :3])
    with pytest.raises(ValueError, match="previous must have 6 rows"):
        momentum(x, previous=x[:4])
    with pytest.raises(ValueError, match="goes with steps=1; got it with steps=10"):
        dm.MomentumStep(0.1, 0.5)(x, momentum.diffusivity(x), previous=x)


class Damped(dm.StateUpdate):
    """x′ = x + a (S v − x) with a learned a."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.a, 0.25)

    def step(
        self, x: Tensor, coupling: Coupling, values: Tensor, source: Tensor | None = None
    ) -> Tensor:
        return x + self.a * (coupling.matmul(values) - x)


def test_every_layer_of_difformer_has_a_copy_of_its_update() -> None:
    torch.manual_seed(0)
    model = dm.DIFFormer(4, 6, 3, 3, update=Damped(), graph=None)
    torch.manual_seed(0)
    plain = dm.DIFFormer(4, 6, 3, 3, tau=0.25, graph=None)
    x = random(6, 4).float()
    torch.testing.assert_close(model(x), plain(x))
    assert (
        len(
            {
                id(parameter)
                for name, parameter in model.named_parameters()
                if name.endswith("update.a")
            }
        )
        == 3
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(17.0)
    model.reset_parameters()
    assert all(conv.update.a.item() == 0.25 for conv in model.convs)
    assert not any((parameter == 17.0).any() for parameter in model.parameters())
    cauchy = dm.FunctionPenalty(lambda z2: 1 / (1 + z2))
    learned = dm.DIFFormer(4, 6, 3, 2, tau=nn.Parameter(torch.tensor(0.5)), kernel=cauchy)
    first, second = (conv.update.tau for conv in learned.convs)
    assert first is not second
    learned(x).sum().backward()
    assert first.grad is not None
    assert dm.DIFFormer(4, 6, 3, update=dm.HeatKernel(0.5), graph=None)(x, EDGES).shape == (6, 3)


def test_an_update_beside_its_own_options_is_refused(no_typecheck: None) -> None:
    with pytest.raises(ValueError, match="tau, beta and leak are those of the explicit step"):
        dm.DIFFormer(4, 6, 3, update=dm.HeatKernel(1.0), tau=0.1)
    with pytest.raises(ValueError, match=r"source=True adds a source, which HeatKernel.* has not"):
        dm.DIFFormer(4, 6, 3, update=dm.HeatKernel(1.0), source=True)
    with pytest.raises(TypeError, match=r"update must be a StateUpdate; got 0\.5"):
        dm.DIFFormer(4, 6, 3, update=0.5)
    x = random(6, 4).float()
    torch.manual_seed(0)
    own = dm.DIFFormer(
        4, 6, 3, 2, source=True, update=dm.ExplicitEuler(0.5, "residual", beta=1.0, leak=0.5)
    )
    torch.manual_seed(0)
    torch.testing.assert_close(own(x), dm.DIFFormer(4, 6, 3, 2, source=True, tau=0.5, leak=0.5)(x))
