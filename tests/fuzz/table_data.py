"""Strategies of data sets, splits and loaders, of training, and of what runs over ranks.

What reads files is given none, or one that the program writes: no data set is needed, and nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .arguments import (
    NOT_A_NUMBER,
    NOT_A_TENSOR,
    Arg,
    choice,
    count,
    edge_list,
    edges,
    fixed,
    flag,
    generator,
    module,
    number,
    options,
    wrong_tensors,
)
from .program import Draw, Strategy, Wrong
from .table_energies import NOT_A_SEED, seed

NOT_A_PATH = [
    Wrong("None", "None"),
    Wrong("3", "a number"),
    Wrong("['a']", "a list"),
    Wrong("torch.ones(2)", "a tensor"),
    Wrong("''", "empty"),
    Wrong("'a\\0b'", "a zero byte"),
    Wrong("b'\\xff'", "bytes"),
    Wrong("'x' * 5000", "too long"),
]
NOT_DATA = [
    Wrong("None", "None"),
    Wrong("'data'", "a string"),
    Wrong("torch.ones(2)", "a tensor"),
    Wrong("[1]", "a list"),
    Wrong("{}", "a dict"),
    Wrong("Data()", "empty"),
    Wrong("Data(edge_index=torch.tensor([[0], [9]]), num_nodes=3)", "with edges beyond N"),
    Wrong("Data(edge_index='abc', num_nodes=3)", "with edges of letters"),
]


def absent(d: Draw) -> Arg:
    """A path where nothing is."""
    return Arg("'absent'", NOT_A_PATH, valid=None)


def labels(d: Draw, right: str) -> Arg:
    """Labels [N]."""
    wrong = [
        Wrong("None", "None"),
        Wrong("'y'", "a string"),
        Wrong("3", "a number"),
        Wrong("[0, 1, 0, 1]", "a list", None),
        Wrong("np.array([0, 1, 0, 1])", "an array", None),
        Wrong("torch.zeros(40)", "floats"),
        Wrong("torch.full((40,), math.nan)", "NaN"),
        Wrong("torch.zeros(40, dtype=torch.bool)", "bools"),
        Wrong("torch.zeros(40, 2, dtype=torch.long)", "of rank two"),
        Wrong("torch.tensor(0)", "of rank zero"),
        Wrong("torch.zeros(40, dtype=torch.complex64)", "complex"),
        Wrong("torch.zeros(40, dtype=torch.long, device='meta')", "on the meta device"),
        Wrong("torch.zeros(40, dtype=torch.long).to_sparse()", "a sparse tensor"),
    ]
    return Arg(right, wrong)


def random_split(d: Draw) -> None:
    """Shares of the labelled nodes."""
    y = labels(d, d.pick(["torch.arange(40) % 3", "torch.arange(40) % 3 - 1", "torch.zeros(40, dtype=torch.int32)"]))
    share = number(d, 0.5, 0.25, below="1.5")
    d.call(
        "out",
        "data.random_split({args})",
        y=y,
        train=share,
        val=number(d, 0.1, 0.0, zero=True, below="1.5"),
        generator=_seeded(d),
    )


def _seeded(d: Draw) -> Arg:
    return Arg("torch.Generator().manual_seed(0)", [*generator(d).wrong, Wrong("None", "None")])


def random_split_per_class(d: Draw) -> None:
    """So many of every class."""
    y = labels(d, d.pick(["torch.arange(40) % 3", "torch.arange(40) % 3 - 1"]))
    d.call(
        "out",
        "data.random_split_per_class({args})",
        y=y,
        per_class=count(d, 2, 5),
        num_val=count(d, 4, 0, zero=True),
        num_test=Arg(d.pick(["None", "5"]), count(d, zero=True, none=True).wrong),
        generator=_seeded(d),
    )


def label_mask(d: Draw) -> None:
    """Who has a label."""
    y = labels(d, d.pick(["torch.arange(40) % 3 - 1", "torch.zeros(0, dtype=torch.long)"]))
    d.call(
        "out",
        "data.label_mask({y})",
        y=Arg(y.right, [w for w in y.wrong if w.what not in ("of rank two", "of rank zero")]),
    )


def split(d: Draw) -> None:
    """The masks of a data set."""
    masks = "train_mask=torch.ones(4, 2) > 0, val_mask=torch.zeros(4, 2) > 0, test_mask=torch.zeros(4, 2) > 0"
    wrong = [*NOT_DATA[:6], Wrong("Data(train_mask='abc', val_mask=3, test_mask=None, y=None)", "with no masks")]
    column = options(
        d, 0, 1, wrong=[*NOT_A_NUMBER, Wrong("-1", "negative"), Wrong("2", "beyond"), Wrong("0.5", "a fraction")]
    )
    d.call("split", "data.Split.of({args})", data=Arg(f"Data({masks}, y=torch.zeros(4).long())", wrong), column=column)
    d.call("out", "split.apply_to({args})", data=Arg("Data(num_nodes=4)", NOT_DATA[:5]))


def pad(d: Draw) -> None:
    """Sequences of different lengths."""
    item = "(torch.tensor([1, 2, 3]), 0)"
    wrong = [
        Wrong("[]", "empty"),
        Wrong("None", "None"),
        Wrong("3", "a number"),
        Wrong("'ab'", "a string"),
        Wrong("[1, 2]", "numbers"),
        Wrong("[(torch.tensor([1]), 0), (torch.tensor([1]), torch.tensor([2]), 0)]", "items of two kinds"),
        Wrong("[([1, 2], 0)]", "lists", None),
        Wrong("[(torch.tensor(1), 0)]", "tokens of rank zero"),
        Wrong("[(torch.ones(2, 2).long(), 0)]", "tokens of rank two"),
        Wrong("[(torch.tensor([1.5]), 0)]", "fractions"),
        Wrong("[(torch.tensor([1]), 'a')]", "a label of letters"),
        Wrong("[(torch.tensor([1]), None)]", "no label"),
        Wrong("torch.ones(2, 2)", "a tensor"),
    ]
    right = [f"[{item}, (torch.tensor([4]), 1)]", f"[{item}]", "[(torch.zeros(0).long(), 1)]"]
    d.call(
        "out",
        "data.pad({args})",
        batch=options(d, *right, wrong=wrong),
        max_length=count(d, 2, optional=True, none=True),
    )


def add_laplacian_pe(d: Draw) -> None:
    """Positional encodings of a graph."""
    d.sizes = None
    both = f"torch.cat([{edge_list(d)}, {edge_list(d)}.flip(0)], 1)"
    wrong = [*NOT_DATA, Wrong("Data(edge_index=torch.tensor([[0], [1]]), num_nodes=3)", "a directed graph")]
    d.call("transform", "data.AddLaplacianPE({args})", k=count(d, 2, 1, 9))
    d.call(
        "out",
        "transform({graph})",
        graph=Arg(f"Data(edge_index={both}, num_nodes={d.nodes})", wrong),
    )
    d.call("vectors", "[out.laplacian_eigenvectors, out.laplacian_eigenvalues]")


def to_diffusion_graph(d: Draw) -> None:
    """Data with their graph."""
    d.sizes = None
    d.call("transform", "data.ToDiffusionGraph({args})", self_loops=choice(d, "add", "remaining", "keep", None))
    given = f"Data(edge_index={edge_list(d)}, num_nodes={d.nodes})"
    d.call("out", "transform({graph}).graph.prepare()", graph=Arg(d.pick([given, f"[{given}, {given}]"]), NOT_DATA))


def data_source(d: Draw, nodes: int | None = None) -> str:
    """A graph with features, labels and masks."""
    n = d.nodes if nodes is None else nodes
    mask = f"torch.ones({n}, dtype=torch.bool)"
    parts = f"x=torch.randn({n}, 3), edge_index={edge_list(d)}, y=torch.zeros({n}).long(), train_mask={mask}"
    return f"Data({parts}, num_nodes={n})"


def part_of(d: Draw) -> None:
    """What a batch knows of its graph."""
    d.sizes = None
    degrees = choice(d, "batch", "full")
    d.call("transform", "data.PartOf({args})", data=Arg(data_source(d), NOT_DATA[:5] + NOT_DATA[6:]), degrees=degrees)
    n = d.nodes
    batch = f"Data(n_id=torch.arange({n}), batch_size={n}, edge_index={edge_list(d)}, num_nodes={n})"
    d.call("out", "transform({batch})", batch=Arg(batch, NOT_DATA[:6]))


def loader(d: Draw) -> None:
    """Random parts."""
    d.sizes = None
    n = max(d.nodes, 4)
    by_parts = not d.maybe(0.5)
    clusters = [
        Wrong(f"[0] * {n}", "a list", None),
        Wrong(f"np.zeros({n}, dtype=np.int64)", "an array", None),
        Wrong("'clusters'", "a string"),
        Wrong(f"torch.zeros({n})", "floats"),
        Wrong(f"torch.zeros({n + 1}).long()", "too long"),
        Wrong(f"torch.full(({n},), -1)", "negative"),
        Wrong(f"torch.full(({n},), 10**9)", "a billion clusters"),
        Wrong(f"torch.zeros({n}, 1).long()", "of rank two"),
        Wrong("3", "a number"),
    ]
    d.call(
        "loader",
        "data.RandomPartitionLoader({args})",
        data=Arg(data_source(d, n), NOT_DATA),
        num_parts=Arg("2" if by_parts else None, count(d, none=True).wrong if by_parts else [], False),
        batch_size=Arg(None if by_parts else "2", [] if by_parts else count(d, none=True).wrong, False),
        clusters=options(d, f"torch.arange({n}) % 2", wrong=clusters, optional=True),
        halo=flag(d),
        degrees=choice(d, "batch", "full"),
        allow_unlabelled=flag(d),
        seed=seed(d),
        num_replicas=Arg(None, [w for w in count(d, none=True).wrong if w.valid is False], True),
    )
    d.call("out", "[batch.x for batch in loader]")


def find_clusters(d: Draw) -> None:
    """Clusters of a graph."""
    d.sizes = None
    metis = d.maybe(0.5)
    d.call(
        "out",
        "data.find_clusters({args})",
        data=Arg(data_source(d, max(d.nodes, 2)), NOT_DATA),
        num_clusters=Arg("2" if metis else None, count(d, none=True).wrong if metis else [], False),
        method=Arg("'metis'" if metis else "'label_propagation'", choice(d, "metis").wrong),
        seed=seed(d),
    )


def list_ops(d: Draw) -> None:
    """Expressions."""
    words = [Wrong("()", "empty"), Wrong("('NONE',)", "another word"), Wrong("3", "a number"), Wrong("None", "None")]
    d.call(
        "tasks",
        "sequences.ListOps({args})",
        split=choice(d, "train", "val", "test"),
        num=count(d, 3, 2, none=True),
        seed=seed(d),
        min_length=count(d, 4, 5),
        max_length=count(d, 60, 90),
        max_depth=count(d, 5, optional=True),
        max_args=count(d, 5, optional=True),
        operators=options(d, "('MIN', 'MAX')", "['SM']", wrong=words, optional=True),
    )
    _items(d, 2)


def _items(d: Draw, last: int) -> None:
    wrong = [Wrong("99", "beyond"), Wrong("-99", "before"), Wrong("1.5", "a fraction"), Wrong("'a'", "a string")]
    wrong += [Wrong("None", "None"), Wrong("[0]", "a list"), Wrong("slice(2)", "a slice"), Wrong("math.nan", "NaN")]
    d.call("out", "tasks[{index}]", index=options(d, 0, last - 1, -1, wrong=wrong))


def pathfinder(d: Draw) -> None:
    """Paths."""
    d.call(
        "tasks",
        "sequences.Pathfinder({args})",
        split=choice(d, "train", "val", "test"),
        num=count(d, 2, 3, none=True),
        seed=seed(d),
        size=count(d, 32, 24),
        dashes=count(d, 4, 6),
        distractors=count(d, 1, 0, zero=True),
        distractor_dashes=count(d, 2, optional=True),
    )
    _items(d, 2)


def sequence_dataset(d: Draw) -> None:
    """A subclass of the base."""
    d.call(
        "Own",
        "type('Own', (sequences.SequenceDataset,), dict(__len__=lambda s: 3, item=lambda s, i: (torch.arange(i), 0)))",
    )
    d.call("tasks", "Own()")
    _items(d, 3)


def reader(of: str, path: str, /, **make: Callable[[Draw], Arg]) -> Strategy:
    """What reads a data set, where there is none."""
    return lambda d: d.call(
        "out", f"{of}({{args}})", **{path: absent(d)}, **{key: value(d) for key, value in make.items()}
    )


def sbm(d: Draw) -> None:
    """Graphs from block models, drawn into a folder of the worker's own."""
    sizes = [
        Wrong("(0, 5)", "a zero"),
        Wrong("(5, 2)", "falling"),
        Wrong("3", "a number"),
        Wrong("('a', 'b')", "letters"),
    ]
    d.call(
        "tasks",
        "graphs.SBMDataset({args})",
        root=Arg("'sbm'", [*NOT_A_PATH[:4], *NOT_A_PATH[5:]]),
        name=Arg("'PATTERN'", choice(d, "PATTERN").wrong),
        split=choice(d, "train", "val", "test"),
        num_graphs=Arg("1", [w for w in count(d).wrong if w.source != "None"]),
        seed=Arg(None, [w for w in seed(d).wrong if w.valid is False], True),
        pattern_sizes=Arg(None, sizes, True),
        log=Arg("False"),
    )
    d.call("out", "[tasks[0].x, tasks[0].y]")


def synthetic_pokec(d: Draw) -> None:
    """A large graph, drawn small."""
    d.call(
        "out",
        "graphs.synthetic_pokec({args})",
        num_nodes=count(d, 50, 20),
        num_edges=count(d, 100, 40),
        num_features=count(d, 4, 2),
        seed=seed(d),
        homophily=number(d, 0.444, 0.6, optional=True, zero=True, below="1.5"),
        signal=number(d, 0.3, 0.0, optional=True, zero=True),
        spread=number(d, 1.5, optional=True, zero=True),
        unlabelled=number(d, 1e-4, 0.1, optional=True, zero=True, below="1.5"),
        cache=Arg(None, NOT_A_PATH[1:4] + NOT_A_PATH[5:], True),
    )


def _train_or_test(d: Draw) -> Arg:
    return choice(d, "train", "test")


def _name(d: Draw) -> Arg:
    """The name of a file that nobody has."""
    return Arg("'nobody'", [w for w in choice(d, "nobody").wrong if w.what != "another string"], valid=None)


def _part(d: Draw) -> Arg:
    return choice(d, "train", "val", "test")


def knn_graph(d: Draw) -> None:
    """Neighbours of drawn points."""
    dtype = "float32" if d.dtype == "float64" else d.dtype
    wrong = [w for w in wrong_tensors(9, 3, dtype=dtype) if w.what not in ("a longer last dimension", "another dtype")]
    wrong = [w if w.what not in ("NaN", "infinite") else Wrong(w.source, w.what) for w in wrong]
    wrong += [
        Wrong("torch.ones(2, 3)", "too few"),
        Wrong("torch.ones(0, 3)", "no rows"),
        Wrong("torch.ones(9, 0)", "no channels"),
    ]
    right = ["torch.randn(9, 3)", "torch.randn(9, 20)", "torch.zeros(9, 3)", "torch.randn(9, 3).half()"]
    right += [f"{scale} * torch.randn(9, 70).double() + {scale}" for scale in ("1e-200", "1e200")]
    x = Arg(d.pick(right), wrong)
    d.call("out", "data.knn_graph({args})", x=x, k=count(d, 5, 2), metric=choice(d, "euclidean", "cosine"))


def knn_transform(d: Draw) -> None:
    """Neighbours of drawn points, as a transform."""
    x = [Wrong("Data(x=torch.ones(9))", "of rank one"), Wrong("Data(x=torch.ones(9, 2).long())", "integers")]
    x += [*NOT_DATA[:6], Wrong("Data(x=torch.randn(2, 2))", "too few")]
    weights = {"weighted": flag(d), "sharpness": number(d, 4.0, 0.5, optional=True)}
    d.call("transform", "data.KNNGraph({args})", k=count(d, 5, 2), metric=choice(d, "euclidean", "cosine"), **weights)
    d.call("out", "transform({data}).edge_index", data=Arg("Data(x=torch.randn(9, 3))", x))


def edge_sums(d: Draw) -> None:
    """Features of edges, summed."""
    d.sizes = None
    e = len(d.edges)
    wrong = [*NOT_DATA, Wrong("Data(edge_index=torch.zeros(2, 3).long(), num_nodes=1)", "without features")]
    wrong += [
        Wrong("Data(edge_index=torch.zeros(2, 3).long(), edge_attr=torch.ones(2, 2), num_nodes=1)", "too few rows"),
        Wrong("Data(edge_index=torch.zeros(2, 1), edge_attr=torch.ones(1, 2), num_nodes=1)", "edges that are floats"),
        Wrong("Data(edge_index=torch.zeros(2, 1).long(), edge_attr='abc', num_nodes=1)", "features of letters"),
    ]
    given = f"Data(edge_index={edge_list(d)}, edge_attr=torch.randn({e}, 2), num_nodes={d.nodes})"
    d.call("out", "graphs.SumEdgeFeatures()({data}).x", data=Arg(given, wrong))


def forecast(d: Draw) -> None:
    """A forecast of drawn snapshots."""
    wrong = [Wrong("[]", "empty"), Wrong("3", "a number"), Wrong("[1, 2]", "numbers"), Wrong("None", "None")]
    d.call(
        "forecast",
        "graphs.fit_forecast({args})",
        name=choice(d, "zero", "last", "mean", "own", "pooled", "ridge", optional=False),
        snapshots=Arg("[Data(x=torch.randn(3, 4), y=torch.randn(3)) for _ in range(5)]", wrong),
    )
    d.call("out", "forecast(torch.randn(3, 4))")


DATA: dict[str, Strategy] = {
    "data.random_split": random_split,
    "data.random_split_per_class": random_split_per_class,
    "data.label_mask": label_mask,
    "data.KNNGraph": knn_transform,
    "data.knn_graph": knn_graph,
    "data.Split": split,
    "data.pad": pad,
    "data.AddLaplacianPE": add_laplacian_pe,
    "data.ToDiffusionGraph": to_diffusion_graph,
    "data.PartOf": part_of,
    "data.RandomPartitionLoader": loader,
    "data.find_clusters": find_clusters,
    "sequences.ListOps": list_ops,
    "sequences.Pathfinder": pathfinder,
    "sequences.SequenceDataset": sequence_dataset,
    "graphs.SBMDataset": sbm,
    "graphs.synthetic_pokec": synthetic_pokec,
    "graphs.load_digits": lambda d: d.call(
        "out", "graphs.load_digits({args}).x", num_neighbors=count(d, 5, 1, optional=True)
    ),
    "sequences.IMDb": reader(
        "sequences.IMDb", "path", split=_train_or_test, max_length=lambda d: count(d, 9, optional=True)
    ),
    "graphs.load_ogb": reader("graphs.load_ogb", "root", name=lambda d: choice(d, "ogbn-arxiv", optional=False)),
    "graphs.SumEdgeFeatures": edge_sums,
    "graphs.load_facebook": reader("graphs.load_facebook", "root", name=_name),
    "graphs.fit_forecast": forecast,
    "graphs.load_heterophilous": reader("graphs.load_heterophilous", "root", name=_name),
    "graphs.load_mnist": reader("graphs.load_mnist", "root", num_images=lambda d: count(d, 9, optional=True)),
    "graphs.load_newsgroups": reader("graphs.load_newsgroups", "root", num_words=lambda d: count(d, 9, optional=True)),
    "graphs.load_snapshots": reader(
        "graphs.load_snapshots",
        "root",
        name=lambda d: choice(d, "chickenpox", "england_covid", optional=False),
        lags=lambda d: count(d, 4, optional=True, none=True),
    ),
    "graphs.load_synmol": reader("graphs.load_synmol", "root", split=lambda d: choice(d, "train", optional=False)),
    "graphs.load_tu": reader("graphs.load_tu", "root", name=_name),
    "graphs.load_planetoid": reader("graphs.load_planetoid", "root", name=lambda d: choice(d, "Cora", optional=False)),
    "graphs.load_pokec": reader("graphs.load_pokec", "root", source=lambda d: choice(d, "snap", "linkx")),
    "graphs.PeptidesFunctional": lambda d: d.call(
        "out",
        "graphs.PeptidesFunctional({args})",
        source=absent(d),
        root=Arg("'peptides'", NOT_A_PATH[:4]),
        split=_part(d),
        num_graphs=count(d, 2, optional=True, none=True),
        log=Arg("False"),
    ),
}

# ---------------------------------------------------------------- training


def node_classifier(d: Draw) -> None:
    """A model that is trained on nodes."""
    d.sizes = None
    d.call(
        "module",
        "train.NodeClassifier({args})",
        model=module("mp.GCNConv(3, 2)"),
        lr=number(d, 0.01, optional=True, zero=True),
        weight_decay=number(d, 5e-4, 0.0, optional=True, zero=True),
        optimizer=choice(d, "adam", "adamw"),
        metric=choice(d, "acc", "roc_auc"),
    )
    wrong = [w for w in NOT_DATA if w.what != "empty"]
    d.call(
        "out",
        "[module({data}), module.predict_step({data}, 0), module.configure_optimizers() and 0]",
        data=Arg(data_source(d), wrong),
    )


def batch_learner(name: str, output: int, **attributes: str) -> Strategy:
    """A model that is trained on batches of graphs."""

    def strategy(d: Draw) -> None:
        d.sizes = None
        task = "'graph'" if name == "GraphClassifier" else "'node'"
        d.call(
            "module",
            f"train.{name}({{args}})",
            model=module(f"mp.DiffusionGNN(3, 4, {output}, task={task})"),
            lr=number(d, 0.01, optional=True, zero=True),
            weight_decay=number(d, 5e-4, 0.0, optional=True, zero=True),
            optimizer=choice(d, "adam", "adamw"),
            metric=choice(d, *(["acc", "roc_auc"] if name == "GraphClassifier" else ["mse", "mae"])),
        )
        given = data_source(d, max(d.nodes, 1))
        for key, value in attributes.items():
            given = f"{given[:-1]}, {key}={value.format(n=max(d.nodes, 1))})"
        batch = f"data.ToDiffusionGraph()([{given}, {given}])"
        d.call("out", "module({batch})", batch=Arg(batch, [w for w in NOT_DATA if w.what != "empty"]))

    return strategy


def score(d: Draw) -> None:
    """A score by name."""
    name = d.pick(["acc", "macro_f1", "roc_auc", "ap", "mrr", "mse", "mae"])
    given = "torch.randn(6), torch.randn(6)" if name in ("mse", "mae") else "torch.randn(6, 2), torch.arange(6) % 2"
    d.call("metric", "train.Score({args})", metric=Arg(repr(name), choice(d, name).wrong))
    d.call("out", f"metric({given})")


def sequence_classifier(d: Draw) -> None:
    """A model that is trained on sequences."""
    d.call(
        "module",
        "train.SequenceClassifier({args})",
        model=module("mp.PDETransformer(3, 4, 2, 1, 2, max_length=9)"),
        classes=count(d, 2, 3),
        lr=number(d, 0.01, optional=True, zero=True),
        weight_decay=number(d, 5e-4, 0.0, optional=True, zero=True),
        warmup=number(d, 0.1, 0.0, optional=True, zero=True, below="1.0"),
    )
    d.call("out", "module(torch.ones(2, 5, 3))")


def loss(name: str) -> Strategy:
    """A loss that refuses what broadcasts."""

    def strategy(d: Draw) -> None:
        n = d.pick([4, 1, 7])
        if name == "node_cross_entropy":
            logits, target = Arg(f"torch.randn({n}, 3)", wrong_tensors(n, 3)), f"torch.zeros({n}).long()"
            logits = Arg(logits.right, [w for w in logits.wrong if w.what not in ("a longer last dimension",)])
            wrong = [Wrong(f"torch.zeros({n})", "floats"), Wrong(f"torch.full(({n},), 9)", "beyond the classes")]
            wrong += [Wrong(f"torch.full(({n},), -1)", "no label"), Wrong(f"torch.zeros({n}) > 0", "bools")]
            wrong += [
                Wrong(f"torch.zeros({n + 1}).long()", "too long"),
                Wrong(f"torch.zeros({n}, 1).long()", "of rank two"),
            ]
            wrong += [Wrong(f"torch.zeros({n}, dtype=torch.long, device='meta')", "on the meta device")]
            wrong += [*NOT_A_TENSOR, Wrong("None", "None"), Wrong(f"torch.zeros({n}).to(torch.complex64)", "complex")]
            d.call("out", "train.node_cross_entropy({args})", logits=logits, target=Arg(target, wrong))
            return
        if name == "multi_label_loss":
            wrong = [Wrong(f"torch.full(({n}, 2), 9)", "beyond 1"), Wrong(f"torch.full(({n}, 2), -1)", "no label")]
            wrong += [*NOT_A_TENSOR, Wrong("None", "None"), Wrong(f"torch.zeros({n}, 5)", "another shape")]
            d.call(
                "out",
                "train.multi_label_loss({args})",
                logits=Arg(f"torch.randn({n}, 2)", wrong_tensors(n, 2)),
                target=Arg(f"torch.ones({n}, 2)", wrong),
            )
            return
        kept = (
            "a list",
            "an array",
            "a string",
            "a number",
            "a dict",
            "a module",
            "None",
            "complex",
            "a sparse tensor",
        )
        strange = [w for w in wrong_tensors(n) if w.what in kept]
        prediction = [w for w in wrong_tensors(n) if w.what not in ("integers", "bools")]
        d.call(
            "out",
            "train.mean_squared_error({args})",
            prediction=Arg(f"torch.randn({n})", prediction),
            target=Arg(f"torch.randn({n})", strange),
        )

    return strategy


def weighted_accuracy(d: Draw) -> None:
    """A score."""
    sizes = count(d, 3, 2)
    d.call("metric", "train.weighted_accuracy({args})", num_classes=Arg(sizes.right, [*sizes.wrong, Wrong("1", "one")]))
    d.call("out", "metric(torch.randn(5, metric.num_classes), torch.zeros(5).long())")


def digits_module(d: Draw) -> None:
    """The digits as a data module."""
    d.call(
        "module",
        "train.DigitsDataModule({args})",
        per_class=count(d, 5, 2, optional=True),
        num_val=count(d, 500, 10, optional=True, zero=True),
        num_neighbors=count(d, 5, optional=True),
        seed=seed(d),
    )
    d.call("out", "module.data.x")


def planetoid_module(d: Draw) -> None:
    """Cora as a data module, where it is not."""
    split = options(d, "'random'", "'public'", "3", wrong=NOT_A_SEED, optional=True)
    d.call(
        "module",
        "train.PlanetoidDataModule({args})",
        root=absent(d),
        name=choice(d, "Cora", "PubMed"),
        split=split,
        seed=seed(d),
        tuning=replace(flag(d), valid=True if split.right == "3" else None),  # which a random split does not know
        sparse=flag(d),
        per_class=count(d, 20, optional=True),
    )
    d.call("out", "module.data")


def table_module(of: str, /, **make: Callable[[Draw], Arg]) -> Strategy:
    """The data module of a table, whose files are not there."""

    def strategy(d: Draw) -> None:
        d.call(
            "module",
            f"train.{of}({{args}})",
            root=absent(d),
            **{key: value(d) for key, value in make.items()},
            split=seed(d),
            tuning=flag(d),
        )
        d.call("out", "module.num_features")

    return strategy


def save_checkpoint(d: Draw) -> None:
    """A checkpoint that is written whole."""
    path = Arg("'a.ckpt'", [*NOT_A_PATH, Wrong("'.'", "a folder")])
    d.call("out", "train.save_checkpoint({args})", state=Arg("{'a': torch.ones(2)}"), path=path)


def replace_file(d: Draw) -> None:
    """A file that is written whole."""
    data = [Wrong("'text'", "a string"), Wrong("None", "None"), Wrong("3", "a number"), Wrong("[1]", "a list")]
    path = Arg("'a.txt'", [*NOT_A_PATH, Wrong("'.'", "a folder")])
    d.call("out", "train.replace_file({args})", path=path, data=Arg("b'text'", data))


def load_checkpoint(d: Draw) -> None:
    """A checkpoint that is read as tensors and plain values."""
    wrong = [Wrong("'.'", "a folder"), Wrong("'absent.ckpt'", "no file"), Wrong("'http://a/b.ckpt'", "an address")]
    d.call("saved", "train.save_checkpoint({'a': torch.ones(2)}, 'b.ckpt')")
    d.call("out", "train.load_checkpoint({args})", path=Arg("'b.ckpt'", [*NOT_A_PATH, *wrong]))


def check_writable(d: Draw) -> None:
    """A folder that can be written to."""
    d.call("out", "train.check_writable({args})", folder=Arg("'out'", [*NOT_A_PATH[:4], *NOT_A_PATH[5:]]))


def _batch_size(d: Draw) -> Arg:
    return count(d, 4, optional=True, none=True)


TRAIN: dict[str, Strategy] = {
    "train.save_checkpoint": save_checkpoint,
    "train.load_checkpoint": load_checkpoint,
    "train.replace_file": replace_file,
    "train.check_writable": check_writable,
    "train.NodeClassifier": node_classifier,
    "train.SequenceClassifier": sequence_classifier,
    "train.node_cross_entropy": loss("node_cross_entropy"),
    "train.mean_squared_error": loss("mean_squared_error"),
    "train.weighted_accuracy": weighted_accuracy,
    "train.multi_label_loss": loss("multi_label_loss"),
    "train.GraphClassifier": batch_learner("GraphClassifier", 2),
    "train.Forecaster": batch_learner("Forecaster", 1, base="torch.zeros({n})"),
    "train.Score": score,
    "train.HeterophilousDataModule": table_module("HeterophilousDataModule", name=_name, normalize_features=flag),
    "train.FacebookDataModule": table_module("FacebookDataModule", name=_name),
    "train.OgbDataModule": table_module("OgbDataModule", name=lambda d: choice(d, "ogbn-arxiv", "ogbn-proteins")),
    "train.KNNDataModule": table_module(
        "KNNDataModule",
        name=lambda d: choice(d, "MNIST", "20Newsgroups"),
        metric=lambda d: choice(d, "euclidean", "cosine"),
        per_class=lambda d: count(d, 5, optional=True),
        num_parts=lambda d: count(d, 1, optional=True),
        sharpness=lambda d: number(d, 4.0, 0.5, optional=True),
    ),
    "train.TUDataModule": table_module("TUDataModule", name=_name, batch_size=_batch_size),
    "train.SynMolDataModule": table_module("SynMolDataModule", batch_size=_batch_size),
    "train.SnapshotDataModule": table_module(
        "SnapshotDataModule",
        name=lambda d: choice(d, "chickenpox", "england_covid"),
        base=lambda d: choice(d, "zero", "ridge"),
        windows=lambda d: count(d, 4, 3, optional=True),
        batch_size=_batch_size,
    ),
    "train.DigitsDataModule": digits_module,
    "train.PlanetoidDataModule": planetoid_module,
}

# ---------------------------------------------------------------- ranks

ONE_RANK = (
    "torch.distributed.is_initialized() or torch.distributed.init_process_group("
    "'gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)"
)


def sharded_graph(d: Draw) -> None:
    """A graph over the ranks of one process."""
    d.sizes = None
    d.nodes = max(d.nodes, 1)  # every rank has a node
    given = edges(d, objects=False)
    n = d.nodes
    wrong = [
        Wrong("[0]", "too short"),
        Wrong(f"[0, {n + 1}]", "beyond N"),
        Wrong("'ab'", "a string"),
        Wrong("3", "a number"),
    ]
    wrong += [Wrong("[None, 3]", "None"), Wrong(f"[1, {n}]", "not from zero"), Wrong(f"[0.5, {n}]", "a fraction")]
    d.call("ranks", ONE_RANK)
    edge_index = Arg(given["edge_index"].right, [w for w in given["edge_index"].wrong if "graph" not in w.what])
    d.call(
        "graph",
        "distributed.ShardedGraph({args})",
        edge_index=edge_index,
        num_nodes=fixed(n, *count(d, zero=True).wrong),
        edge_weight=given["edge_weight"],
        bounds=options(d, f"[0, {n}]", wrong=wrong, optional=True),
        device=options(d, "'cpu'", wrong=[Wrong("'nowhere'", "no device"), Wrong("3.5", "a number")], optional=True),
    )
    d.call("out", "[graph.degree(), graph.rows, graph.total(torch.ones(2))]")


def node_parallel(d: Draw) -> None:
    """A model on one rank."""
    d.call("ranks", ONE_RANK)
    group = [Wrong("'group'", "a string"), Wrong("[0]", "a list")]
    d.call("out", "distributed.node_parallel({args})", model=module("nn.Linear(2, 2)"), group=Arg(None, group, True))


DISTRIBUTED: dict[str, Strategy] = {
    "distributed.ShardedGraph": sharded_graph,
    "distributed.node_parallel": node_parallel,
}
