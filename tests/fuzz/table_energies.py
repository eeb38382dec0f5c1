"""Strategies of penalties, energies and certificates, of diagnostics, and of the checks in `testing`."""

# ruff: noqa: F403, F405 (the vocabulary of the tables)
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from diffusion_mp.energies.constraints import CONSTRAINTS

from .arguments import *
from .program import Draw, Strategy, Wrong
from .signatures import arguments, calls, construct, counts, numbers, texts
from .table_models import masks
from .table_operators import FALLING, MIXTURE, NOT_FALLING

FREE = ("a longer last dimension", "another dtype")  # where the channels may be any


def penalty(**options: Any) -> Strategy:
    def strategy(d: Draw) -> None:
        construct(d, "penalty", **options)
        numbers = fixed(f"torch.rand({d.nodes}{kind(d)})")
        rows = {"x": free(d), "ptr": ptr(d)}
        uses: list[tuple[str, dict[str, Arg]]] = [
            ("delta({z2})", {"z2": numbers}),
            ("f({z2})", {"z2": numbers}),
            ("total({args})", rows),
            ("coupling({args}).to_dense()", rows | {"normalize": flag(d)}),
        ]
        use, passed = d.pick(uses)
        d.call("out", f"penalty.{use}", **passed)

    return strategy


def energy(d: Draw) -> None:
    terms = any_terms(d)
    constraint = texts(*CONSTRAINTS)
    construct(d, "energy", leave="graph radius", terms=terms, constraint=constraint)
    d.call(
        "out",
        "[energy({x}), energy.by_graph({x}), repr(energy)]",
        x=free(d),
        finite=False,
    )


def certify(d: Draw) -> None:
    subject = d.pick(["penalty", "coupling", "diffusivity"])
    right = {
        "penalty": ["mp.SigmoidPenalty()", "mp.GaussianPenalty()"],
        "coupling": [coupling_source(d, symmetric=True)],
        "diffusivity": DIFFUSIVITIES,
    }[subject]
    passed = {
        "subject": options(
            d,
            *right,
            wrong=bad(
                "None | a string | a number | a tensor | a class: mp.SimplePenalty"
            ),
        ),
        "x": free(d) if subject == "penalty" else free(d).unsure(),
        "tau": number(d, 0.5, 0.1),
        "ptr": ptr(d) if subject == "penalty" else never([]),
    }
    d.call("out", "mp.certify({args})", finite=False, **arguments(d, **passed))


def certify_step(d: Draw) -> None:
    within = d.pick(["None", "'ball'", "'sphere'"])
    joint = Arg(
        "energy", bad("None | a string: 'gaussian' | a penalty: mp.GaussianPenalty()")
    )
    d.call(
        "energy", f"mp.Energy([mp.energies.PairTerm(mp.GaussianPenalty())], {within})"
    )
    passed = {"energy": joint, "x": free(d)}
    d.call("out", "mp.energies.certify_step({args})", finite=False, **passed)


def energy_trace(d: Draw) -> None:
    c = d.channels
    traced = module("model", *bad("a module without diffusion: nn.Linear(2, 2)"))
    # Of modules, a list is right, and none of these has one that runs.
    traced = traced.without("a list")
    of = options(
        d,
        "mp.Energy([mp.energies.PairTerm(mp.QuadraticPenalty())])",
        wrong=NOT_A_FUNCTION,
        optional=True,
    ).without("None")
    d.call("model", f"mp.DIFFormer({c}, 4, 2, 2)")
    d.call("trace", "mp.EnergyTrace({args})", model=traced, energy=of)
    x = Arg(real(d, d.nodes, c, dtype="float32"))
    d.call(
        "ran",
        "(trace.__enter__(), model({x}, {edge_index}))[1]",
        x=x,
        edge_index=fixed(edge_list(d)),
    )
    d.call("out", "(trace.__exit__(None, None, None), trace.energies)")


def any_terms(d: Draw) -> Arg:
    wrong = bad(
        "None | a number | a class in it: [mp.energies.MLPTerm] | a penalty in it: [mp.GaussianPenalty()]"
    )
    pairs = "mp.energies.PairTerm(mp.GaussianPenalty())"
    return options(
        d,
        f"[{pairs}]",
        f"[mp.energies.ProximalTerm(), 0.5 * {pairs}]",
        "()",
        wrong=wrong,
    )


def term(
    make: Callable[[Draw], dict[str, Arg]] = lambda d: {}, **options: Any
) -> Strategy:
    """A term, and the energy of which it is a part."""

    def strategy(d: Draw) -> None:
        construct(d, "term", **options, **make(d))
        x = real(d, d.nodes, d.channels)
        joint = Arg(
            "[term]",
            bad(
                "None | a number | a class in it: [mp.energies.MLPTerm] | a module in it: [nn.ReLU()]"
            ),
        )
        of = "mp.Energy({terms}, graph={graph})"
        d.call("energy", of, terms=joint, graph=fixed(graph_source(d)))
        d.call(
            "out", f"[energy({x}), energy.by_graph({x}), repr(energy)]", finite=False
        )

    return strategy


def matrices(d: Draw, *names: str) -> dict[str, Arg]:
    return {
        name: tensor(d, 1, d.channels, d.channels).unsure(
            "another dtype", "on the meta device"
        )
        for name in names
    }


def source_and_metric(d: Draw) -> dict[str, Arg]:
    metric = tensor(d, d.nodes, optional=True, positive=True)
    source = tensor(d, d.nodes, d.channels).unsure("another dtype")
    if (
        metric.right is not None
    ):  # which would not fit these, so that it might be named instead
        source = source.without("a higher rank", "a lower rank", "on the meta device")
    return {"source": source, "metric": metric}


def of_matrix(d: Draw) -> dict[str, Arg]:
    n = d.nodes
    of = f"torch.ones({d.nodes}, 1, 1)"
    signed = f"mp.couplings.SparseCoupling(mp.Graph({n}, {edge_list(d)}), torch.randn({len(d.edges)}, 1))"
    wrong = NOT_A_COUPLING + bad(
        f"signed: mp.couplings.LowRankCoupling({of}, {of}, positive_semidefinite=True)"
    )
    right = d.pick([coupling_source(d, symmetric=True), signed])
    diagonals = tensor(d, 1, d.channels).unsure(
        "another dtype", "on the meta device", "a higher rank"
    )
    matrix = (
        diagonals
        if d.maybe(0.4)
        else matrices(d, "matrix")["matrix"].unsure("a lower rank")
    )
    matrix = Arg("None") if d.maybe(0.2) else matrix.without("None")
    return {"coupling": Arg(right, wrong), "matrix": matrix}


def of_attention(d: Draw) -> dict[str, Arg]:
    prior = f"mp.couplings.SparseCoupling(mp.Graph({d.nodes}, {edge_list(d)}), nonnegative=True)"
    wrong = [w for w in NOT_A_COUPLING if w.what != "None"]
    return {
        "prior": Arg(prior if d.maybe(0.4) else None, wrong, True),
        **matrices(d, "query", "key"),
    }


def of_mlp(d: Draw) -> dict[str, Arg]:
    return {
        "matrix": tensor(d, 3, d.channels),
        "bias": tensor(d, 3),
    }


def edges_of_a_graph(d: Draw) -> Arg:
    graph = f"mp.Graph({d.nodes}, {edge_list(d)})"
    return Arg(
        f"mp.couplings.SparseCoupling({graph}, nonnegative=True)", NOT_A_COUPLING
    )


def _factor(d: Draw) -> Arg:
    """A weight, which may also be computed by a module."""
    return number(d, 2.0, 0.0, zero=True).without("a module")


TERMS: dict[str, Strategy] = {
    "SourceTerm": term(source_and_metric),
    "CouplingTerm": term(
        leave="centre", coupling=lambda d: coupling(d, symmetric=True)
    ),
    "EdgeTerm": term(
        leave="constraint",
        coupling=edges_of_a_graph,
    ),
    "LinearTerm": term(source=lambda d: tensor(d, d.nodes, d.channels)),
    "ProximalTerm": term(),
    "PairTerm": term(
        leave="projection constraint read",
        penalty=lambda d: any_penalty(d).without("a module"),
    ),
    "MatrixTerm": term(of_matrix, leave="norms symmetric"),
    "AttentionTerm": term(of_attention, leave="norms"),
    "MLPTerm": term(of_mlp),
    "ScaledTerm": term(weight=_factor),
}


ENERGIES: dict[str, Strategy] = {
    **TERMS,
    "GaussianPenalty": penalty(),
    "QuadraticPenalty": penalty(),
    "SigmoidPenalty": penalty(),
    "SimplePenalty": penalty(),
    "SoftmaxPenalty": penalty(),
    "FunctionPenalty": penalty(
        always="f",
        domain=fixed(
            "(0.0, math.inf)",
            *bad("a number | not from zero: (1.0, 2.0) | one end: (0.0,)"),
        ),
        delta=never([]),
        f=lambda d: options(d, *FALLING, wrong=NOT_FALLING + bad("None")),
    ),
    "MixturePenalty": penalty(**MIXTURE),
    "Energy": energy,
    "EnergyTrace": energy_trace,
    "certify": certify,
    "certify_step": certify_step,
    "certify_trajectory": calls(finite=False),
}


def full_graph_inference(d: Draw) -> None:
    d.sizes = None
    right = [
        f"mp.{name}({d.channels}, 4, 3)"
        for name in (
            "DIFFormer",
            "SGFormer",
            "NodeFormer",
            "DiffusionGNN",
            "CertifiedTransformer",
        )
    ]
    passed = edges(d)
    passed.pop("batch")
    features = state(d, dtype="float32").without("a sparse tensor")  # which models take
    special = {
        "model": options(d, *right, wrong=NOT_A_MODULE),
        "x": features,
        "edge_attr": never([]),  # which these models do not read
        "progress": Arg("False"),
        "method": Arg("'forward'"),  # the only one of models that are not certified
    }
    construct(d, "out", **passed, **special)


def released_state_dict(d: Draw) -> None:
    other = ["{'fcs.0.weight': torch.ones(4, 3)}", "{'unknown': torch.ones(1)}", "{}"]
    wrong = bad(
        "a file: 'model.pkl' | None | a list: [torch.ones(1)] | a number: {'fcs.0.weight': 1.0}",
        "a number for a name: {0: torch.ones(1)}",
    )
    right = (
        "{'fcs.0.weight': torch.ones(4, 3), 'fcs.0.bias': torch.ones(4), 'fcs.1.weight': torch.ones(2, 4), "
        "'fcs.1.bias': torch.ones(2)}"
    )
    target = Arg(
        "mp.DIFFormer(3, 4, 2, 1, layer_norm=False, transform=False, projection=None)",
        NOT_A_MODULE,
    )
    released = Arg(
        right, wrong + [Wrong(name, "tensors of another model") for name in other]
    )
    d.call(
        "out", "mp.models.released_state_dict({args})", model=target, released=released
    )


NOT_A_STATE = bad(
    "gives a string: lambda x: 'x' | gives a pair: lambda x: (x, x) | gives complex numbers: lambda x: x + 1j"
)
OTHER_STATES = bad(
    "gives a higher rank: lambda x: x.unsqueeze(0) | gives more: lambda x: torch.cat([x, x[..., :1], x])",
    "gives integers: lambda x: x.long() | gives a sparse tensor: lambda x: x.to_sparse()",
    "gives a meta tensor: lambda x: x.to('meta')",
)
NOT_A_NUMBER_OF = bad("gives a string?: lambda x: 'x' | gives nothing?: lambda x: None")


def _refusing(arg: Arg, *which: str) -> Arg:
    return replace(
        arg,
        wrong=[replace(w, valid=False) if w.what in which else w for w in arg.wrong],
    )


def fixed_point(d: Draw) -> None:
    size = d.pick([4, 1, 0])
    x0 = tensor(d, size).unsure(*FREE, "a lower rank", "a higher rank")
    wrong = NOT_A_FUNCTION + NOT_A_STATE + (OTHER_STATES if size else [])
    construct(
        d,
        "out",
        leave="what",
        step=options(d, "torch.cos", "lambda x: 0.5 * x + 1", wrong=wrong),
        x0=_refusing(x0, "NaN", "infinite") if size else x0,
        energy=lambda d: options(
            d, "lambda x: -x.sum()", wrong=NOT_A_FUNCTION + NOT_A_NUMBER_OF
        ).without("None"),
        total=lambda d: options(d, "lambda x: x", wrong=NOT_A_FUNCTION).without("None"),
        ptr=lambda d: options(
            d,
            "None",
            f"torch.tensor([0, {size}])",
            f"torch.tensor([0, {size // 2}, {size}])",
        ),
    )


def sequences(d: Draw, channels: int, dtype: str = "float64") -> dict[str, Arg]:
    size = d.pick([2, 1, 3, 0])
    length = d.pick([5, 1, 7, 0])
    x = Arg(
        real(d, size, length, channels, dtype=dtype),
        wrong_tensors(size, length, channels, dtype=dtype),
    )
    mask = masks(d, size, length)
    tokens = size * length > 0 and mask.right is None  # else there may be none
    return {"x": _refusing(x, "NaN", "infinite") if tokens else x, "mask": mask}


def roughness(d: Draw) -> None:
    size = d.pick([2, 1, 0])
    length = d.pick([5, 1, 0])
    x = tensor(d, size, length, d.channels).unsure(*FREE)
    d.call("out", "mp.diagnostics.roughness({args})", x=x, mask=masks(d, size, length))


SMOOTHING = bad("a string | a number | another module: nn.Linear(2, 2)")
ATTENTION = "mp.PDETransformer(3, 4, 2, 1, 2, max_length=9).blocks[0].attention"
PLACED = "mp.PDETransformer(3, 4, 2, 1, 2, max_length=9, placement='P1').double()"


def commutator(d: Draw) -> None:
    passed = {"diffusion": Arg("mp.PDEDiffusion1d(4)", SMOOTHING + bad("None"))}
    passed["attention"] = Arg(f"{ATTENTION}.eval()", NOT_A_FUNCTION)
    d.call(
        "out",
        "mp.diagnostics.commutator({args})",
        **passed,
        **sequences(d, 4, "float32"),
    )


def _placed(d: Draw) -> dict[str, Arg]:
    d.call("model", PLACED)
    asked = {"points": count(d, 2, 1), "tol": number(d, 1e-2)}
    return {
        "model": Arg("model", NOT_A_MODULE).without("a function"),
        **sequences(d, 3),
        **asked,
    }


def perturbation_bound(d: Draw) -> None:
    site = Arg(
        "model.after_embedding",
        bad("None | a string: 'site' | a module of another: nn.Linear(2, 2)"),
    )
    smoothing = options(
        d, "mp.PDEDiffusion1d(4).double()", wrong=SMOOTHING, optional=True
    )
    target = "mp.diagnostics.perturbation_bound({model}, {site}, {x}, {args})"
    d.call("out", target, site=site, diffusion=smoothing, **_placed(d))


def diagnose(d: Draw) -> None:
    wrong = bad("a string: 'after_embedding' | no module: ['nowhere'] | a number")
    sites = options(d, "['after_embedding']", wrong=wrong, optional=True)
    smoothing = Arg(
        "mp.PDEDiffusion1d(4).double()" if sites.right else None,
        SMOOTHING,
        not sites.right,
    )
    d.call(
        "report",
        "mp.diagnose({model}, {x}, {args})",
        sites=sites,
        diffusion=smoothing,
        **_placed(d),
    )
    wrong = bad("no column: 'nonsense' | None | a number")
    d.call(
        "out",
        "report.plot({args})",
        quantity=options(d, "'commutator'", "'estimate'", wrong=wrong, optional=True),
    )


def random_features(d: Draw) -> Arg:
    wrong = NOT_A_DIFFUSIVITY + bad("of another kind: mp.SimpleDiffusivity()")
    return Arg(f"mp.KernelizedSoftmaxDiffusivity({d.channels}){to_dtype(d)}", wrong)


def feature_counts(d: Draw) -> Arg:
    wrong = bad(
        "empty? | a zero: [0] | a fraction: [1.5] | a string | a number | None | a module"
    )
    return options(d, "[4]", "(2, 8)", wrong=wrong)


def observed(d: Draw) -> Arg:
    n = d.nodes
    other = f"of other nodes: mp.Graph({n + 2}, torch.zeros(2, 1, dtype=torch.long))"
    return just_graph(d, f"a graph without edges: mp.Graph({n})", other)


def stable(d: Draw) -> Arg:
    right = (
        f"mp.couplings.UniformCoupling({d.nodes})",
        f"mp.couplings.IdentityCoupling({d.nodes})",
    )
    wrong = NOT_A_COUPLING + bad(
        "one with normalised rows: mp.SimpleDiffusivity()(torch.ones(2, 2))"
    )
    return options(d, *right, wrong=wrong)


FUNCTIONS: dict[str, Strategy] = {
    "auxiliary_loss": calls(),
    "cite": calls(),
    "show_progress": calls(),
    "edge_loss": calls(
        finite=False,
        graph=observed,
    ),
    "fixed_point": fixed_point,
    "full_graph_inference": full_graph_inference,
    "kernel_error": calls(
        diffusivity=random_features,
        x=state,
        num_features=feature_counts,
    ),
    "lipschitz": calls(
        f=lambda d: options(
            d, "torch.sin", "lambda x: 2 * x", wrong=NOT_A_FUNCTION + NOT_A_STATE
        ),
        x=lambda d: tensor(d, d.pick([4, 1, 0])).unsure(
            *FREE, "a lower rank", "a higher rank"
        ),
    ),
    "released_state_dict": released_state_dict,
    "roughness": roughness,
    "posterior_variance": calls(coupling=stable, leak=numbers(0.5, 0.1)),
    "commutator": commutator,
    "perturbation_bound": perturbation_bound,
    "diagnose": diagnose,
    "diagnostics.plot_attention": calls(
        coupling=lambda d: coupling(d, symmetric=True).unsure("of other nodes"),
        ax=never(bad("a string: 'ax' | a number")),
        head=lambda d: options(d, 0, wrong=NOT_A_NUMBER + bad("negative | beyond")),
    ),
}


def checked(right: str, wrong: list[Wrong], **make: Make) -> Strategy:
    def strategy(d: Draw) -> None:
        passed = {
            "subject": Arg(right, wrong),
            **{key: arg(d) for key, arg in make.items()},
            "seed": seed(d),
        }
        d.call("out", f"{d.name}({{subject}}, {{args}})", **passed)

    return strategy


def _inert(wrong: list[Wrong]) -> list[Wrong]:
    """Without what can be called: a function may build what is checked, and what it raises is its own."""
    return [
        w
        for w in wrong
        if w.what not in ("a class", "a function", "a module", "a diffusivity")
    ]


def problem(d: Draw) -> None:
    construct(d, "problem")
    uses: list[tuple[str, dict[str, Arg]]] = [
        ("coupling.degree()", {}),
        ("heat({args})", {"t": number(d, 0.5, 1.0, zero=True)}),
    ]
    use, passed = d.pick(uses)
    d.call("out", f"problem.{use}", **passed)


def three_dimensional(d: Draw) -> Arg:
    return tensor(d, d.nodes, 1, d.channels).unsure(
        "another dtype", "a longer last dimension"
    )


UNIFORM = "mp.couplings.UniformCoupling(5, dtype=torch.float64)"
TESTING: dict[str, Strategy] = {
    "testing.check_coupling": checked(UNIFORM, _inert(NOT_A_COUPLING)),
    "testing.check_diffusivity": checked(
        "mp.UniformDiffusivity()",
        _inert(NOT_A_DIFFUSIVITY),
    ),
    "testing.check_update": checked("mp.ExplicitEuler(0.5)", _inert(NOT_A_MODULE)),
    "testing.check_layer": checked("mp.MLPConv(4, 3)", _inert(NOT_A_MODULE)),
    "testing.check_energy_term": calls(
        z=three_dimensional,
        starts=counts(2, 1),
        ascent=counts(3, 1),
    ),
    "testing.assert_energy_descent": checked(
        "mp.ExplicitEuler(0.5)",
        NOT_A_FUNCTION,
        instances=counts(1, 2),
        steps=counts(1, 2),
        num_nodes=counts(4, 6),
        in_channels=lambda d: count(d, 2, 3).without("None"),
        energy=lambda d: never(NOT_A_FUNCTION).without("None"),
    ),
    "testing.path_problem": problem,
    "testing.random_problem": problem,
    "testing.cosine_mode": calls(k=counts(1, 2, zero=True)),
    "testing.order_of_convergence": calls(
        step=Arg("mp.ExplicitEuler", NOT_A_FUNCTION),
        problem=Arg(
            "testing.path_problem(4)", bad("None | a string: 'path' | a tensor")
        ),
        count=counts(8, 16),
    ),
}
