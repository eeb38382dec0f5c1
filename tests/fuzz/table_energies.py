"""Strategies of penalties, energies and certificates, of diagnostics, and of the checks in `testing`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .arguments import (
    DIFFUSIVITIES,
    NOT_A_COUPLING,
    NOT_A_DIFFUSIVITY,
    NOT_A_MODULE,
    NOT_A_NUMBER,
    NOT_A_TENSOR,
    Arg,
    choice,
    count,
    coupling,
    coupling_source,
    edge_list,
    edges,
    fixed,
    flag,
    generator,
    graph,
    just_graph,
    module,
    number,
    options,
    ptr,
    real,
    state,
    tensor,
    wrong_tensors,
)
from .program import Draw, Strategy, Wrong
from .table_models import masks
from .table_operators import FALLING, MIXTURE, NOT_FALLING

NOT_A_PENALTY = [
    Wrong("'nonsense'", "another name"),
    Wrong("None", "None"),
    Wrong("3", "a number"),
    Wrong("[1]", "a list"),
    Wrong("mp.SigmoidPenalty", "a class"),
    Wrong("nn.Linear(2, 2)", "a module"),
    Wrong("torch.ones(2)", "a tensor"),
]
NOT_A_FUNCTION = [
    Wrong("None", "None"),
    Wrong("'f'", "a string"),
    Wrong("3", "a number"),
    Wrong("[1]", "a list"),
    Wrong("torch.ones(2)", "a tensor"),
]
NOT_A_SEED = [
    Wrong("'seed'", "a string"),
    Wrong("None", "None"),
    Wrong("1.5", "a fraction"),
    Wrong("[1]", "a list"),
    Wrong("torch.ones(2)", "a tensor"),
    Wrong("math.nan", "NaN"),
    Wrong("-1", "negative", None),
    Wrong("2**70", "beyond 64 bits", None),
]
FREE = ("a longer last dimension", "another dtype")  # where the channels may be any


def seed(d: Draw) -> Arg:
    """A seed."""
    return options(d, 0, 1, wrong=NOT_A_SEED, optional=True)


def _free(arg: Arg, *kept: str) -> Arg:
    """The argument of a function that takes any number of channels."""
    return arg.unsure(*FREE, *kept)


# ---------------------------------------------------------------- energies


def penalty(name: str, **make: Callable[[Draw], Arg]) -> Strategy:
    """A penalty and its functions."""

    def strategy(d: Draw) -> None:
        d.call("penalty", f"mp.{name}({{args}})", **{key: value(d) for key, value in make.items()})
        asked = d.pick(["delta", "f", "conjugate", "total", "coupling"])
        if asked in ("delta", "f", "conjugate"):
            argument = "omega" if asked == "conjugate" else "z2"
            kind = "" if d.dtype == "float32" else f", dtype=torch.{d.dtype}"
            wrong = [
                w for w in wrong_tensors(d.nodes) if w.what in ("a list", "an array", "a string", "None", "a dict")
            ]
            wrong += [Wrong(f"torch.ones({d.nodes}, dtype=torch.complex64)", "complex")]
            d.call("out", f"penalty.{asked}({{{argument}}})", finite=asked != "conjugate", **{
                argument: Arg(f"torch.rand({d.nodes}{kind})", wrong)
            })  # fmt: skip
        elif asked == "total":
            d.call("out", "penalty.total({args})", x=_free(state(d, parameters=False), "a higher rank"), ptr=ptr(d))
        else:
            x = _free(state(d, parameters=False), "a higher rank")
            d.call("coupling", "penalty.coupling({args})", x=x, ptr=ptr(d), normalize=flag(d))
            d.call("out", "[coupling.degree(), coupling.to_dense()]")

    return strategy


def own_penalty(d: Draw) -> None:
    """A subclass of the base."""
    d.call(
        "Own",
        "type('Own', (mp.Penalty,), dict(delta=lambda s, z2: z2.clone(), _conjugate=lambda s, w: w * 0, "
        "score=property(lambda s: mp.QuadraticPenalty().score)))",
    )
    d.call("penalty", "Own()")
    d.call("out", "penalty.total({args})", x=_free(state(d, parameters=False), "a higher rank"), ptr=ptr(d))


def energy(d: Draw) -> None:
    """An energy at a state."""
    over = d.maybe(0.3)
    right = ["'quadratic'", "mp.QuadraticPenalty()"] if over else ["'sigmoid'", "'quadratic'", "mp.GaussianPenalty()"]
    like = d.nodes, d.channels
    of = coupling(d, symmetric=True)
    relu = choice(d, "relu", None)
    metric = tensor(d, d.nodes, optional=True, positive=True)
    source = tensor(d, *like, optional=True)
    d.call(
        "energy",
        "mp.Energy({args})",
        penalty=options(d, *right, wrong=NOT_A_PENALTY),
        lam=number(d, 1.0, 0.3, optional=True),
        coupling=Arg(of.right if over else None, of.wrong[1:], True),
        source=Arg(source.right, source.wrong, True),
        beta=number(d, 1.0, 0.0, optional=True, negative=True, zero=True),
        leak=number(d, 0.0, 0.2, optional=True, zero=True),
        metric=metric.without("a higher rank").or_left_out(),
        graph_term=coupling(d, symmetric=True, optional=True),
        activation=relu,
        version=choice(d, "falling"),
        ptr=Arg(None if over else ptr(d).right, ptr(d).wrong, True),
    )
    bare = source.right is None and metric.right is None
    x = state(d, parameters=False)
    x = _free(x, "a higher rank") if bare else x.without("a higher rank")
    finite = relu.right in (None, "None")
    if d.maybe(0.2):
        at = state(d, parameters=False)
        d.call("out", "energy.surrogate({args})", finite=finite, x=x, x_prev=Arg("None"), at=Arg(at.right, at.wrong))
    else:
        d.call("out", "energy({args})", finite=finite, x=x, x_prev=tensor(d, *like, optional=True))


def certify(d: Draw) -> None:
    """A certificate."""
    subject = d.pick(["penalty", "coupling", "diffusivity"])
    right = {
        "penalty": ["mp.SigmoidPenalty()", "mp.GaussianPenalty()"],
        "coupling": [coupling_source(d, symmetric=True)],
        "diffusivity": DIFFUSIVITIES,
    }[subject]
    wrong = [
        Wrong("None", "None"),
        Wrong("'simple'", "a string"),
        Wrong("3", "a number"),
        Wrong("torch.eye(3)", "a tensor"),
        Wrong("mp.SimplePenalty", "a class"),
    ]
    x = _free(state(d, parameters=False), "a higher rank")
    if subject != "penalty":
        x = x.unsure()
    bounds = Arg(ptr(d).right, ptr(d).wrong, True) if subject == "penalty" else Arg(None, [], True)
    d.call(
        "out",
        "mp.certify({args})",
        finite=False,
        subject=options(d, *right, wrong=wrong),
        x=x,
        tau=number(d, 0.5, 0.1),
        form=choice(d, "conservative", "residual"),
        leak=number(d, 0.0, 0.2, optional=True, zero=True),
        ptr=bounds,
    )


def certify_step(d: Draw) -> None:
    """A certificate of a step down a joint energy."""
    within = d.pick(["None", "'ball'", "'sphere'"])
    wrong = [Wrong("None", "None"), Wrong("'gaussian'", "a string"), Wrong("mp.GaussianPenalty()", "a penalty")]
    given = coupling(d, symmetric=True, optional=True)
    x = _free(state(d, parameters=False), "a higher rank")
    d.call("energy", f"mp.energies.JointEnergy('gaussian', constraint={within})")
    d.call(
        "out",
        "mp.certify_step({args})",
        finite=False,
        energy=Arg("energy", wrong),
        coupling=Arg(given.right or "None", given.wrong),
        x=x,
    )


def certify_trajectory(d: Draw) -> None:
    """A certificate of a run."""
    d.call(
        "out",
        "mp.certify_trajectory({args})",
        finite=False,
        penalty=options(d, "mp.SigmoidPenalty()", "mp.MixturePenalty()", wrong=NOT_A_PENALTY),
        x=_free(state(d, parameters=False), "a higher rank"),
        tau=number(d, 0.5, 1.0),
        ptr=Arg(ptr(d).right, ptr(d).wrong, True),
    )


def certificate(d: Draw) -> None:
    """The record that `certify` gives."""
    d.call("out", "mp.Certificate(theorem='Theorem 1', holds=True, tau=0.5, reason='Here.')", finite=False)
    d.call("text", "str(out)")


def energy_trace(d: Draw) -> None:
    """The energies of a running model."""
    c = d.channels
    plain = Wrong("nn.Linear(2, 2)", "a module without diffusion")
    d.call("model", f"mp.DIFFormer({c}, 4, 2, 2)")
    d.call("trace", "mp.EnergyTrace({args})", model=module("model", plain), energy=options(
        d, "mp.Energy('quadratic')", wrong=NOT_A_FUNCTION[1:], optional=True
    ))  # fmt: skip
    x = Arg(real(d, d.nodes, c, dtype="float32"))
    d.call("ran", "(trace.__enter__(), model({x}, {edge_index}))[1]", x=x, edge_index=fixed(edge_list(d)))
    d.call("out", "(trace.__exit__(None, None, None), trace.energies, trace.to_dict())")


def bounds(d: Draw) -> None:
    """How much a step lowers the energy."""
    d.call(
        "out",
        "mp.energy_bounds({args})",
        coupling=coupling(d, symmetric=True, other_size=None),
        tau=number(d, 0.5, 0.1),
    )


def joint_energy(d: Draw) -> None:
    """An energy of source, graph, pairs and constraint at a state."""
    like = d.nodes, d.channels
    source, metric = (tensor(d, *shape, optional=True, positive=True) for shape in (like, (d.nodes,)))
    weight = [w for w in number(d, zero=True).wrong if w.valid is False]
    d.call(
        "energy",
        "mp.JointEnergy({args})",
        penalty=options(
            d,
            "'simple'",
            "'gaussian'",
            "None",
            "mp.SigmoidPenalty()",
            wrong=[w for w in NOT_A_PENALTY if w.source != "None"],
        ),
        **{
            name: options(d, 1.0, 0.0, "torch.tensor(0.5)", wrong=weight, optional=True)
            for name in ("lam", "mu", "beta")
        },
        graph_term=coupling(d, symmetric=True, optional=True),
        source=source,
        metric=metric.without("a higher rank").or_left_out(),
        constraint=choice(d, None, "nonnegative", "ball", "sphere"),
        radius=number(d, 1.0, 2.0, optional=True),
        ptr=ptr(d),
        mean=flag(d),
    )
    x = _free(state(d, parameters=False), "a higher rank")
    d.call("out", "[energy({x}), energy.surrogate({x}, {x}), repr(energy)]", x=x, finite=False)


ENERGIES: dict[str, Strategy] = {
    "JointEnergy": joint_energy,
    "Penalty": own_penalty,
    "QuadraticPenalty": penalty("QuadraticPenalty"),
    "SimplePenalty": penalty("SimplePenalty"),
    "SigmoidPenalty": penalty("SigmoidPenalty"),
    "SoftmaxPenalty": penalty("SoftmaxPenalty", dim=lambda d: count(d, 4, 1)),
    "GaussianPenalty": penalty("GaussianPenalty", bandwidth=lambda d: number(d, 1.0, 0.5, optional=True)),
    "FunctionPenalty": penalty(
        "FunctionPenalty",
        f=lambda d: options(d, *FALLING, wrong=[*NOT_FALLING, Wrong("None", "None")]),
        domain=lambda d: options(
            d,
            "(0.0, math.inf)",
            wrong=[Wrong("3", "a number"), Wrong("(1.0, 2.0)", "not from zero"), Wrong("(0.0,)", "one end")],
            optional=True,
        ),
    ),
    "MixturePenalty": penalty("MixturePenalty", **MIXTURE),
    "Energy": energy,
    "EnergyTrace": energy_trace,
    "Certificate": certificate,
    "certify": certify,
    "certify_step": certify_step,
    "certify_trajectory": certify_trajectory,
    "energy_bounds": bounds,
}

# ---------------------------------------------------------------- functions


def edge_loss(d: Draw) -> None:
    """The loss of observed edges."""
    given = just_graph(d)
    wrong = [*given.wrong, Wrong(f"mp.Graph({d.nodes})", "a graph without edges")]
    wrong += [Wrong(f"mp.Graph({d.nodes + 2}, torch.zeros(2, 1, dtype=torch.long))", "of other nodes")]
    right = coupling(d, other_size=None)
    d.call("out", "mp.edge_loss({args})", finite=False, coupling=right, graph=Arg(given.right, wrong))


def of_module(name: str) -> Strategy:
    """A function of a model."""

    def strategy(d: Draw) -> None:
        right = ["mp.NodeFormer(4, 4, 2)", "nn.Linear(2, 2)", "mp.GCNConv(4, 2)", "nn.Identity()"]
        d.call("out", f"mp.{name}({{args}})", model=options(d, *right, wrong=NOT_A_MODULE))

    return strategy


def full_graph_inference(d: Draw) -> None:
    """A model on a whole graph."""
    c = d.channels
    right = [
        f"mp.DIFFormer({c}, 4, 3)",
        f"mp.SGFormer({c}, 4, 3)",
        f"mp.NodeFormer({c}, 4, 3)",
        f"mp.DiffusionGNN({c}, 4, 3)",
    ]
    d.sizes = None
    given = edges(d)
    x = state(d, dtype="float32")
    d.call(
        "out",
        "mp.full_graph_inference({args})",
        model=options(d, *right, wrong=NOT_A_MODULE),
        x=x,
        edge_index=given["edge_index"],
        edge_weight=given["edge_weight"],
        block_size=count(d, 3, 65536, optional=True),
        device=options(d, "'cpu'", wrong=[Wrong("'nowhere'", "no device"), Wrong("3.5", "a number")], optional=True),
        progress=Arg("False"),
    )


def released_state_dict(d: Draw) -> None:
    """Parameters of other code for a model, most of them none that fit."""
    names = "{'fcs.0.weight': torch.ones(4, 3)}", "{'unknown': torch.ones(1)}", "{}"
    wrong = [Wrong("'model.pkl'", "a file"), Wrong("None", "None"), Wrong("[torch.ones(1)]", "a list")]
    wrong += [Wrong("{'fcs.0.weight': 1.0}", "a number"), Wrong("{0: torch.ones(1)}", "a number for a name")]
    wrong += [Wrong(name, "tensors of another model") for name in names]
    d.call(
        "out",
        "mp.released_state_dict({args})",
        model=Arg("mp.DIFFormer(3, 4, 2, 1, layer_norm=False, transform=False, projection=None)", NOT_A_MODULE),
        released=Arg(
            "{'fcs.0.weight': torch.ones(4, 3), 'fcs.0.bias': torch.ones(4), 'fcs.1.weight': torch.ones(2, 4), "
            "'fcs.1.bias': torch.ones(2)}",
            wrong,
        ),
    )


def kernel_error(d: Draw) -> None:
    """How far random features are off."""
    wrong = [
        Wrong("[]", "empty", None),
        Wrong("[0]", "a zero"),
        Wrong("[1.5]", "a fraction"),
        Wrong("'ab'", "a string"),
        Wrong("3", "a number"),
        Wrong("None", "None"),
        Wrong("nn.Linear(2, 2)", "a module"),
    ]
    attention = f"mp.KernelizedSoftmaxDiffusivity({d.channels})"
    to = "" if d.dtype == "float32" else f".to(torch.{d.dtype})"
    d.call(
        "out",
        "mp.kernel_error({args})",
        diffusivity=Arg(attention + to, [*NOT_A_DIFFUSIVITY, Wrong("mp.SimpleDiffusivity()", "of another kind")]),
        x=state(d),
        num_features=options(d, "[4]", "(2, 8)", wrong=wrong),
        graph=graph(d),
        draws=count(d, 1, 2),
        generator=generator(d),
    )


def lipschitz(d: Draw) -> None:
    """How much a function stretches."""
    x = _free(tensor(d, d.pick([4, 1, 0])), "a lower rank", "a higher rank")
    d.call(
        "out",
        "mp.lipschitz({args})",
        f=options(d, "torch.sin", "lambda x: 2 * x", wrong=[*NOT_A_FUNCTION, *NOT_A_STATE]),
        x=x,
        tol=number(d, 1e-2, 1e-1, optional=True),
        max_iter=count(d, 1000, optional=True),
        generator=generator(d),
    )


NOT_A_STATE = [
    Wrong("lambda x: 'x'", "gives a string"),
    Wrong("lambda x: (x, x)", "gives a pair"),
    Wrong("lambda x: x + 1j", "gives complex numbers"),
]
OTHER_STATES = [
    Wrong("lambda x: x.unsqueeze(0)", "gives a higher rank"),
    Wrong("lambda x: torch.cat([x, x[..., :1], x])", "gives more"),
    Wrong("lambda x: x.long()", "gives integers"),
    Wrong("lambda x: x.to_sparse()", "gives a sparse tensor"),
    Wrong("lambda x: x.to('meta')", "gives a meta tensor"),
]
NOT_A_NUMBER_OF = [Wrong("lambda x: 'x'", "gives a string", None), Wrong("lambda x: None", "gives nothing", None)]


def _refusing(arg: Arg, *which: str) -> Arg:
    """The argument where these have to be refused."""
    return replace(arg, wrong=[replace(w, valid=False) if w.what in which else w for w in arg.wrong])


def fixed_point(d: Draw) -> None:
    """Where a step comes to rest."""
    size = d.pick([4, 1, 0])
    x0 = _free(tensor(d, size), "a lower rank", "a higher rank")
    d.call(
        "out",
        "mp.fixed_point({args})",
        step=options(
            d,
            "torch.cos",
            "lambda x: 0.5 * x + 1",
            wrong=[*NOT_A_FUNCTION, *NOT_A_STATE, *(OTHER_STATES if size else [])],
        ),
        x0=_refusing(x0, "NaN", "infinite") if size else x0,
        energy=options(d, "lambda x: -x.sum()", wrong=[*NOT_A_FUNCTION[1:], *NOT_A_NUMBER_OF], optional=True),
        total=options(d, "lambda x: x", wrong=NOT_A_FUNCTION[1:], optional=True),
        tol=number(d, 1e-3, 1e-2, optional=True, none=True),
        max_iter=count(d, 1000, optional=True),
        memory=count(d, 10, 0, optional=True, zero=True),
    )


def sequences(d: Draw, channels: int, dtype: str = "float64") -> tuple[Arg, Arg]:
    """x [B, L, C] and its mask."""
    size, length = d.pick([2, 1, 3, 0]), d.pick([5, 1, 7, 0])
    x = Arg(real(d, size, length, channels, dtype=dtype), wrong_tensors(size, length, channels, dtype=dtype))
    mask = masks(d, size, length)
    tokens = size * length > 0 and mask.right is None  # else there may be none
    return _refusing(x, "NaN", "infinite") if tokens else x, mask


def smoothing_floor(d: Draw) -> None:
    """How far apart a source keeps nodes."""
    d.call(
        "out",
        "mp.smoothing_floor({args})",
        coupling=coupling(d, symmetric=True, other_size=None),
        x=_free(state(d, parameters=False), "a higher rank"),
        source=_free(state(d, parameters=False), "a higher rank"),
        beta=number(d, 1.0, 0.5, optional=True, negative=True, zero=True),
        leak=number(d, 0.0, 0.2, optional=True, zero=True),
    )


def roughness(d: Draw) -> None:
    """How much a state varies."""
    size, length = d.pick([2, 1, 0]), d.pick([5, 1, 0])
    x = _free(tensor(d, size, length, d.channels))
    d.call("out", "mp.roughness({args})", x=x, mask=masks(d, size, length))


SMOOTHING = [Wrong("'pde'", "a string"), Wrong("3", "a number"), Wrong("nn.Linear(2, 2)", "another module")]
ATTENTION = "mp.PDETransformer(3, 4, 2, 1, 2, max_length=9).blocks[0].attention"


def commutator(d: Draw) -> None:
    """What does not commute."""
    x, mask = sequences(d, 4, "float32")
    d.call(
        "out",
        "mp.commutator({args})",
        diffusion=Arg("mp.PDEDiffusion1d(4)", [*SMOOTHING, Wrong("None", "None")]),
        attention=Arg(f"{ATTENTION}.eval()", [*NOT_A_FUNCTION]),
        x=x,
        mask=mask,
    )


def perturbation_bound(d: Draw) -> None:
    """What an inserted layer does."""
    x, mask = sequences(d, 3)
    wrong_sites = [Wrong("None", "None"), Wrong("'site'", "a string"), Wrong("nn.Linear(2, 2)", "a module of another")]
    d.call("model", "mp.PDETransformer(3, 4, 2, 1, 2, max_length=9, placement='P1').double()")
    d.call(
        "out",
        "mp.perturbation_bound({model}, {site}, {x}, {args})",
        model=Arg("model", [*NOT_A_MODULE[:6]]),
        site=Arg("model.after_embedding", wrong_sites),
        x=x,
        mask=mask,
        points=count(d, 2, 1),
        tol=number(d, 1e-2),
        diffusion=options(d, "mp.PDEDiffusion1d(4).double()", wrong=SMOOTHING, optional=True),
    )


def diagnose(d: Draw) -> None:
    """Everything about placements."""
    x, mask = sequences(d, 3)
    wrong_sites = [Wrong("'after_embedding'", "a string"), Wrong("['nowhere']", "no module"), Wrong("3", "a number")]
    inserted = options(d, "['after_embedding']", wrong=wrong_sites, optional=True)
    smoothing = Arg("mp.PDEDiffusion1d(4).double()" if inserted.right else None, SMOOTHING, not inserted.right)
    d.call("model", "mp.PDETransformer(3, 4, 2, 1, 2, max_length=9, placement='P1').double()")
    d.call(
        "report",
        "mp.diagnose({model}, {x}, {args})",
        model=Arg("model", [*NOT_A_MODULE[:6]]),
        x=x,
        mask=mask,
        sites=inserted,
        diffusion=smoothing,
        points=count(d, 2, 1),
        tol=number(d, 1e-2),
    )
    wrong = [Wrong("'nonsense'", "no column"), Wrong("None", "None"), Wrong("3", "a number")]
    d.call("out", "report.plot({args})", quantity=options(d, "'commutator'", "'estimate'", wrong=wrong, optional=True))


def plot_attention(d: Draw) -> None:
    """A coupling as a picture."""
    wrong = [*NOT_A_NUMBER, Wrong("-1", "negative"), Wrong("9", "beyond")]
    d.call(
        "out",
        "diagnostics.plot_attention({args})",
        coupling=coupling(d, symmetric=True, other_size=None),
        ax=Arg(None, [Wrong("'ax'", "a string"), Wrong("3", "a number")], True),
        head=options(d, 0, wrong=wrong, optional=True),
        threshold=number(d, 1e-8, optional=True),
    )


def posterior_variance(d: Draw) -> None:
    """How uncertain every node is."""
    right = f"mp.UniformCoupling({d.nodes})", f"mp.IdentityCoupling({d.nodes})"
    wrong = [*NOT_A_COUPLING, Wrong("mp.SimpleDiffusivity()(torch.ones(2, 2))", "one with normalised rows")]
    d.call("out", "mp.posterior_variance({args})", coupling=options(d, *right, wrong=wrong), leak=number(d, 0.5, 0.1))


def record(source: str) -> Strategy:
    """A record that the library makes; its properties are read."""
    return lambda d: d.call("out", source)


FUNCTIONS: dict[str, Strategy] = {
    "auxiliary_loss": of_module("auxiliary_loss"),
    "cite": of_module("cite"),
    "edge_loss": edge_loss,
    "fixed_point": fixed_point,
    "full_graph_inference": full_graph_inference,
    "kernel_error": kernel_error,
    "lipschitz": lipschitz,
    "released_state_dict": released_state_dict,
    "roughness": roughness,
    "smoothing_floor": smoothing_floor,
    "posterior_variance": posterior_variance,
    "commutator": commutator,
    "perturbation_bound": perturbation_bound,
    "diagnose": diagnose,
    "diagnostics.plot_attention": plot_attention,
    "diagnostics.SmoothingFloor": record("diagnostics.SmoothingFloor(1.0, 2.0, 0.0, 1.0).floor"),
    "diagnostics.Commutator": record("diagnostics.Commutator(1.0, None, 0.0).relative"),
    "diagnostics.Perturbation": record("diagnostics.Perturbation(1.0, 2.0, 0.5, None, 1.0, 1.0).estimate"),
    "diagnostics.PlacementReport": record("diagnostics.PlacementReport({'layer': []}, {'layer': []}).to_dict()"),
}

# ---------------------------------------------------------------- testing


def checked(name: str, right: str, wrong: list[Wrong], **make: Callable[[Draw], Arg]) -> Strategy:
    """A check of `testing` on something that passes it."""

    def strategy(d: Draw) -> None:
        own = {key: value(d) for key, value in make.items()}
        d.call("out", f"testing.{name}({{subject}}, {{args}})", subject=Arg(right, wrong), **own, seed=seed(d))

    return strategy


def level(d: Draw) -> Arg:
    """How much is asked."""
    return choice(d, "core", "strict")


def _made(wrong: list[Wrong]) -> list[Wrong]:
    """Without what can be called: a function may build what is checked, and what it raises is its own."""
    return [w for w in wrong if w.what not in ("a class", "a function", "a module", "a diffusivity")]


def problem(name: str, *sizes: str) -> Strategy:
    """A problem with a known answer."""

    def strategy(d: Draw) -> None:
        own = {size: count(d, 4, 7, optional=True) for size in sizes}
        if name == "random_problem":
            own["seed"] = seed(d)
        d.call("problem", f"testing.{name}({{args}})", **own, form=choice(d, "conservative", "residual"))
        asked = d.pick(["coupling", "heat", "implicit", "steady"])
        if asked == "coupling":
            d.call("out", "problem.coupling.degree()")
        elif asked == "heat":
            d.call("out", "problem.heat({args})", t=number(d, 0.5, 1.0, zero=True))
        elif asked == "implicit":
            d.call(
                "out",
                "problem.implicit_step({args})",
                tau=number(d, 0.5, 1.0, zero=True),
                leak=number(d, 0.1, optional=True, zero=True),
            )
        else:
            source = Arg("torch.ones_like(problem.state)", [*NOT_A_TENSOR, Wrong("None", "None")])
            d.call("out", "problem.steady_state({args})", source=source, leak=number(d, 0.5, zero=True))

    return strategy


def problem_on_graph(d: Draw) -> None:
    """A problem on a graph of one's own."""
    wrong = [
        *NOT_A_TENSOR,
        Wrong("None", "None"),
        Wrong("torch.ones(3)", "of rank one"),
        Wrong("torch.ones(3, 4)", "not square"),
        Wrong("torch.triu(torch.ones(3, 3), 1)", "not symmetric"),
        Wrong("torch.full((3, 3), math.nan)", "NaN"),
        Wrong("-torch.ones(3, 3)", "negative"),
        Wrong("torch.ones(3, 3, dtype=torch.complex64)", "complex"),
    ]
    d.call(
        "problem",
        "testing.problem_on_graph({args})",
        name=Arg("'mine'", [Wrong("3", "a number", None)]),
        adjacency=Arg("torch.ones(3, 3) - torch.eye(3)", wrong),
        form=choice(d, "conservative", "residual"),
        seed=seed(d),
    )
    d.call("out", "problem.heat(0.5)")


def one_problem(d: Draw) -> None:
    """The record itself."""
    d.call("problem", "testing.Problem('mine', torch.eye(3).double(), torch.ones(3, 1, 2).double())")
    d.call("out", "[problem.laplacian, problem.heat(0.5), problem.coupling.degree()]")


def cosine_mode(d: Draw) -> None:
    """A mode of the path."""
    d.call("out", "testing.cosine_mode({args})", num_nodes=count(d, 5, 8), k=count(d, 1, 2, zero=True))


def order_of_convergence(d: Draw) -> None:
    """The order of an update."""
    wrong = [Wrong("[]", "empty"), Wrong("3", "a number"), Wrong("[0, 1]", "a zero"), Wrong("'ab'", "a string")]
    not_problems = [Wrong("None", "None"), Wrong("'path'", "a string"), Wrong("torch.eye(3)", "a tensor")]
    d.call(
        "out",
        "testing.order_of_convergence({args})",
        step=Arg("mp.ExplicitEuler", NOT_A_FUNCTION),
        problem=Arg("testing.path_problem(4)", not_problems),
        t=number(d, 0.5, optional=True),
        counts=options(d, "(8, 16)", wrong=wrong),
    )


def tolerance(d: Draw) -> None:
    """An entry of the table of tolerances."""
    wrong = [Wrong("'float32'", "a string"), Wrong("torch.int64", "integers"), Wrong("None", "None")]
    d.call(
        "out",
        "testing.tolerance({args})",
        operation=choice(d, "product", "degree", "gradient", optional=False),
        dtype=options(d, "torch.float32", "torch.float64", wrong=wrong),
    )


TESTING: dict[str, Strategy] = {
    "testing.check_coupling": checked(
        "check_coupling", "mp.UniformCoupling(5, dtype=torch.float64)", _made(NOT_A_COUPLING)
    ),
    "testing.check_diffusivity": checked(
        "check_diffusivity", "mp.UniformDiffusivity()", _made(NOT_A_DIFFUSIVITY), level=level
    ),
    "testing.check_update": checked("check_update", "mp.ExplicitEuler(0.5)", _made(NOT_A_MODULE), level=level),
    "testing.check_layer": checked("check_layer", "mp.MLPConv(4, 3)", _made(NOT_A_MODULE)),
    "testing.assert_energy_descent": checked(
        "assert_energy_descent",
        "mp.ExplicitEuler(0.5)",
        NOT_A_MODULE,
        instances=lambda d: count(d, 1, 2),
        steps=lambda d: count(d, 1, 2),
        num_nodes=lambda d: count(d, 4, 6),
        channels=lambda d: count(d, 2, 3),
        energy=lambda d: Arg(None, NOT_A_FUNCTION[1:], True),
    ),
    "testing.path_problem": problem("path_problem", "num_nodes"),
    "testing.cycle_problem": problem("cycle_problem", "num_nodes"),
    "testing.complete_problem": problem("complete_problem", "num_nodes"),
    "testing.grid_problem": problem("grid_problem", "rows", "columns"),
    "testing.random_problem": problem("random_problem", "num_nodes"),
    "testing.problem_on_graph": problem_on_graph,
    "testing.Problem": one_problem,
    "testing.exact_problems": record("len(testing.exact_problems())"),
    "testing.cosine_mode": cosine_mode,
    "testing.order_of_convergence": order_of_convergence,
    "testing.tolerance": tolerance,
    "testing.Tolerance": record("testing.Tolerance(1e-3, 1e-3)"),
}
