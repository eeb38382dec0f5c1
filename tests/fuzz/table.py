"""The table: a strategy for every public name, or the reason why it has none."""

from random import Random

from .program import Program, Strategy, draw_program
from .table_data import DATA, DISTRIBUTED, TRAIN
from .table_energies import ENERGIES, FUNCTIONS, TESTING
from .table_layers import LAYERS
from .table_models import MODELS
from .table_operators import COUPLINGS, DIFFUSIVITIES, UPDATES

# A name of `diffusion_mp` as it is, one of a package within it with that package's name.
STRATEGIES: dict[str, Strategy] = (
    COUPLINGS | DIFFUSIVITIES | UPDATES | ENERGIES | LAYERS | MODELS | FUNCTIONS
)
STRATEGIES |= DATA | TRAIN | TESTING | DISTRIBUTED

#: What is not called at random, and why.
EXEMPT: dict[str, str] = {
    **dict.fromkeys(
        (
            "Coupling",
            "EnergyTerm",
            "Penalty",
            "PooledCoupling",
            "ScorePenalty",
            "StateUpdate",
            "TermModule",
        ),
        "a base class: its public methods are called of what inherits them",
    ),
    **dict.fromkeys(
        (
            "Certificate",
            "diagnostics.Perturbation",
            "diagnostics.PlacementReport",
            "testing.Problem",
            "testing.Tolerance",
            "testing.TOLERANCES",
            "testing.exact_problems",
            "testing.tolerance",
        ),
        "a record, or a table of them: the library makes it",
    ),
    **dict.fromkeys(
        (
            "ConvergenceError",
            "CouplingMismatchError",
            "SingularSystemError",
            "distributed.RankLostError",
        ),
        "an error: the library raises it, nobody calls it",
    ),
    **dict.fromkeys(
        (
            "train.CheckpointFiles",
            "train.Resumable",
            "train.FiniteLoss",
            "train.exit_code",
        ),
        "it belongs to a run; experiments/tests/train kills and resumes runs, some with losses of NaN",
    ),
    **dict.fromkeys(
        ("estimators.DiffusionClassifier", "estimators.DiffusionRegressor"),
        "scikit-learn's check_estimator calls it, in tests/estimators",
    ),
    **dict.fromkeys(
        ("estimators.LabelledKFold", "estimators.labelled_scorer"),
        "scikit-learn calls it in cross-validations, in tests/estimators",
    ),
    "export.in_plain_torch": "it takes an exported program, which is made in seconds; tests/export makes some",
    "load": "it takes a file; tests/models/test_saving.py and test_hostile_files.py in experiments/tests write some",
}

#: How often a name is drawn, compared with the others: what takes long seldom, what has many options often.
WEIGHTS: dict[str, float] = {
    **dict.fromkeys([*LAYERS, *MODELS, *COUPLINGS], 2.0),
    **dict.fromkeys(TESTING, 0.1),
    "diagnose": 0.3,
    "perturbation_bound": 0.3,
    "sequences.Pathfinder": 0.3,
    "graphs.SBMDataset": 0.2,
    "diagnostics.plot_attention": 0.2,
}


def drawn(seed: int, index: int, name: str | None = None) -> Program:
    """Program number ``index`` of a seed; the first of them visit every name once."""
    if name is None:
        names = list(STRATEGIES)
        if index < len(names):
            name = names[index]
        else:
            weights = [WEIGHTS.get(each, 1.0) for each in names]
            (name,) = Random(f"{seed}/{index}").choices(names, weights)
    return draw_program(name, STRATEGIES[name], seed, index)
