"""Strategies of data sets, splits and loaders, of training, and of what runs over ranks."""

# ruff: noqa: F403, F405 (the vocabulary of the tables)
from dataclasses import replace

from .arguments import *
from .program import Draw, Strategy
from .signatures import calls, construct, counts, numbers, texts

NOT_DATA = bad(
    "None | a string | a tensor | a list | a dict | empty: Data() | with edges of letters: "
    "Data(edge_index='abc', num_nodes=3)",
    "with edges beyond N: Data(edge_index=torch.tensor([[0], [9]]), num_nodes=3)",
)


def written(path: str, *special: str) -> Arg:
    return Arg(repr(path), NOT_A_PATH + bad(*special))


def labels(d: Draw) -> Arg:
    wrong = not_integers(
        "40",
        "None | a list?: [0, 1, 0, 1] | an array?: np.array([0, 1, 0, 1]) | NaN: torch.full((40,), math.nan)",
        "of rank two: torch.zeros(40, 2, dtype=torch.long) | of rank zero: torch.tensor(0)",
    )
    return Arg(
        d.pick(
            [
                "torch.arange(40) % 3",
                "torch.arange(40) % 3 - 1",
                "(torch.arange(40) % 3).int()",
            ]
        ),
        wrong,
    )


def split(d: Draw) -> None:
    masks = "train_mask=torch.ones(4, 2) > 0, val_mask=torch.zeros(4, 2) > 0, test_mask=torch.zeros(4, 2) > 0"
    wrong = NOT_DATA[:6] + bad(
        "with no masks: Data(train_mask='abc', val_mask=3, test_mask=None, y=None)"
    )
    column = options(
        d, 0, 1, wrong=NOT_A_NUMBER + bad("negative | beyond: 2 | a fraction: 0.5")
    )
    d.call(
        "split",
        "data.Split.of({args})",
        data=Arg(f"Data({masks}, y=torch.zeros(4).long())", wrong),
        column=column,
    )
    d.call("out", "split.apply_to({args})", data=Arg("Data(num_nodes=4)", NOT_DATA[:5]))


def pad(d: Draw) -> None:
    item = "(torch.tensor([1, 2, 3]), 0)"
    wrong = bad(
        "empty | None | a number | a string | numbers: [1, 2] | lists?: [([1, 2], 0)] | a tensor: torch.ones(2, 2)",
        "items of two kinds: [(torch.tensor([1]), 0), (torch.tensor([1]), torch.tensor([2]), 0)]",
        "tokens of rank zero: [(torch.tensor(1), 0)] | tokens of rank two: [(torch.ones(2, 2).long(), 0)]",
        "fractions: [(torch.tensor([1.5]), 0)] | a label of letters: [(torch.tensor([1]), 'a')]",
        "no label: [(torch.tensor([1]), None)]",
    )
    right = [
        f"[{item}, (torch.tensor([4]), 1)]",
        f"[{item}]",
        "[(torch.zeros(0).long(), 1)]",
    ]
    longest = count(d, 2, optional=True).without("None")
    d.call(
        "out",
        "data.pad({args})",
        batch=options(d, *right, wrong=wrong),
        max_length=longest,
    )


def data_source(d: Draw, nodes: int | None = None) -> str:
    n = d.nodes if nodes is None else nodes
    mask = f"torch.ones({n}, dtype=torch.bool)"
    parts = f"x=torch.randn({n}, 3), edge_index={edge_list(d)}, y=torch.zeros({n}).long(), train_mask={mask}"
    return f"Data({parts}, num_nodes={n})"


def plain_data(d: Draw, attributes: str = "") -> str:
    return f"Data(edge_index={edge_list(d)}, {attributes}num_nodes={d.nodes})"


def batch_of(d: Draw) -> Arg:
    batch = plain_data(d, f"n_id=torch.arange({d.nodes}), batch_size={d.nodes}, ")
    return Arg(batch, NOT_DATA[:6])


def undirected(d: Draw) -> Arg:
    both = f"torch.cat([{edge_list(d)}, {edge_list(d)}.flip(0)], 1)"
    wrong = NOT_DATA + bad(
        "a directed graph: Data(edge_index=torch.tensor([[0], [1]]), num_nodes=3)"
    )
    return Arg(f"Data(edge_index={both}, num_nodes={d.nodes})", wrong)


def with_features(d: Draw) -> Arg:
    """A graph with features of its edges."""
    none = "edge_index=torch.zeros(2, {n}){of}, {attr}num_nodes=1".format
    wrong = NOT_DATA + bad(
        f"without features: Data({none(n=3, of='.long()', attr='')})",
        f"too few rows: Data({none(n=3, of='.long()', attr='edge_attr=torch.ones(2, 2), ')})",
        f"edges that are floats: Data({none(n=1, of='', attr='edge_attr=torch.ones(1, 2), ')})",
        f"features of letters: Data({none(n=1, of='.long()', attr='''edge_attr='abc', ''')})",
    )
    return Arg(plain_data(d, f"edge_attr=torch.randn({len(d.edges)}, 2), "), wrong)


def loader(d: Draw) -> None:
    n = max(d.nodes, 4)
    by_parts = not d.maybe(0.5)
    clusters = bad(
        f"a list?: [0] * {n} | an array?: np.zeros({n}, dtype=np.int64) | a string | floats: torch.zeros({n})",
        f"a number | too long: torch.zeros({n + 1}).long() | of rank two: torch.zeros({n}, 1).long()",
        f"negative: torch.full(({n},), -1) | a billion clusters: torch.full(({n},), 10**9)",
    )
    sizes = count(d).without("None").wrong
    passed = {
        "data": Arg(data_source(d, n), NOT_DATA),
        "num_parts": Arg("2" if by_parts else None, sizes if by_parts else [], False),
        "batch_size": Arg(None if by_parts else "2", [] if by_parts else sizes, False),
        "clusters": options(d, f"torch.arange({n}) % 2", wrong=clusters, optional=True),
        "num_replicas": never([w for w in sizes if w.valid is False]),
    }
    construct(d, "loader", leave="rank", **passed)
    d.call("out", "[batch.x for batch in loader]")


def find_clusters(d: Draw) -> None:
    metis = d.maybe(0.5)
    passed = {
        "data": Arg(data_source(d, max(d.nodes, 2)), NOT_DATA),
        "num_clusters": Arg(
            "2" if metis else None,
            count(d).without("None").wrong if metis else [],
            False,
        ),
        "method": Arg(
            "'metis'" if metis else "'label_propagation'", choice(d, "metis").wrong
        ),
    }
    d.call("out", "data.find_clusters({args})", **passed, seed=seed(d))


def item(d: Draw) -> Arg:
    wrong = bad(
        "beyond: 99 | before: -99 | a fraction: 1.5 | a string: 'a' | None | a list: [0] | a slice: slice(2) | NaN"
    )
    return options(d, 0, 1, -1, wrong=wrong)


def operators(d: Draw) -> Arg:
    wrong = bad("empty: () | another word: ('NONE',) | a number | None")
    return options(d, "('MIN', 'MAX')", "['SM']", wrong=wrong)


def sequence_dataset(d: Draw) -> None:
    body = "{'__len__': lambda s: 3, 'item': lambda s, i: (torch.arange(i), 0)}"
    d.call("Own", f"type('Own', (sequences.SequenceDataset,), {body})")
    d.call("out", "Own()[{index}]", index=item(d))


def _name(d: Draw) -> Arg:
    return replace(choice(d, "nobody").without("another string"), valid=None)


def points(d: Draw) -> Arg:
    dtype = "float32" if d.dtype == "float64" else d.dtype
    right = [
        "torch.randn(9, 3)",
        "torch.randn(9, 20)",
        "torch.zeros(9, 3)",
        "torch.randn(9, 3).half()",
    ]
    right += [
        f"{scale} * torch.randn(9, 70).double() + {scale}"
        for scale in ("1e-200", "1e200")
    ]
    arg = Arg(d.pick(right), wrong_tensors(9, 3, dtype=dtype)).without(
        "a longer last dimension", "another dtype"
    )
    wrong = [
        replace(w, valid=False) if w.what in ("NaN", "infinite") else w
        for w in arg.wrong
    ]
    more = bad(
        "too few: torch.ones(2, 3) | no rows: torch.ones(0, 3) | no channels: torch.ones(9, 0)"
    )
    return replace(arg, wrong=wrong + more)


DATA: dict[str, Strategy] = {
    "data.random_split": calls(y=labels),
    "data.random_split_per_class": calls(
        y=labels,
        num_val=counts(4, 0, zero=True),
        num_test=lambda d: Arg(
            d.pick(["None", "5"]), count(d, zero=True).without("None").wrong
        ),
    ),
    "data.label_mask": calls(
        y=lambda d: labels(d).without("of rank two", "of rank zero")
    ),
    "KNNGraph": calls(
        "made({data}).edge_index",
        data=Arg(
            "Data(x=torch.randn(9, 3))",
            NOT_DATA[:6]
            + bad(
                "of rank one: Data(x=torch.ones(9)) | integers: Data(x=torch.ones(9, 2).long())",
                "too few: Data(x=torch.randn(2, 2))",
            ),
        ),
    ),
    "knn_graph": calls(x=points, k=counts(5, 2)),
    "data.Split": split,
    "data.pad": pad,
    "data.AddLaplacianPE": calls(
        "made({graph})",
        "[out.laplacian_eigenvectors, out.laplacian_eigenvalues]",
        k=counts(2, 1, 9),
        graph=undirected,
    ),
    "data.ToDiffusionGraph": calls(
        "made({graph}).graph.prepare()",
        graph=lambda d: Arg(
            d.pick([plain_data(d), f"[{plain_data(d)}, {plain_data(d)}]"]), NOT_DATA
        ),
    ),
    "data.PartOf": calls(
        "made({batch})",
        batch=batch_of,
        data=lambda d: Arg(data_source(d), NOT_DATA).without("empty"),
    ),
    "data.RandomPartitionLoader": loader,
    "data.find_clusters": find_clusters,
    "sequences.ListOps": calls(
        "made[{index}]",
        index=item,
        always="num min_length max_length",
        min_length=counts(4, 5),
        max_length=counts(60, 90),
        operators=operators,
    ),
    "sequences.Pathfinder": calls(
        "made[{index}]",
        index=item,
        always="num size dashes distractors",
    ),
    "sequences.SequenceDataset": sequence_dataset,
    "sequences.IMDb": calls(),
    "graphs.SBMDataset": calls(
        "[made[0].x, made[0].y]",
        always="num_graphs",
        root=written("sbm").without("empty"),
        name=lambda d: Arg("'PATTERN'", choice(d, "PATTERN").wrong),
        num_graphs=counts(1),
        seed=never([w for w in NOT_A_SEED if w.valid is False]),
        pattern_sizes=never(
            bad("a zero: (0, 5) | falling: (5, 2) | a number | letters: ('a', 'b')")
        ),
    ),
    "graphs.synthetic_pokec": calls(
        always="num_nodes num_edges num_features",
        num_nodes=counts(50, 20),
        num_edges=counts(100, 40),
        num_features=counts(4, 2),
        homophily=numbers(0.444, 0.6, zero=True, below="1.5"),
        signal=numbers(0.3, 0.0, zero=True),
        spread=numbers(1.5, zero=True),
        unlabelled=numbers(1e-4, 0.1, zero=True, below="1.5"),
        cache=never(NOT_A_PATH).without("None", "empty"),
    ),
    "graphs.load_digits": calls("made.x"),
    "graphs.load_rows": calls("made.x", name=lambda d: choice(d, "iris", "moons")),
    "graphs.SumEdgeFeatures": calls("made({data}).x", data=with_features),
    "graphs.fit_forecast": calls(
        "made(torch.randn(3, 4))",
        snapshots=Arg(
            "[Data(x=torch.randn(3, 4), y=torch.randn(3)) for _ in range(5)]",
            bad("empty | a number | numbers: [1, 2] | None"),
        ),
    ),
    "graphs.PeptidesFunctional": calls(
        root=Arg("'peptides'", NOT_A_PATH[:4]),
        num_graphs=counts(2),
    ),
    "graphs.load_planetoid": calls(name=texts("Cora")),
    **{
        f"graphs.load_{name}": calls()
        for name in ("ogb", "mnist", "newsgroups", "snapshots", "synmol", "pokec")
    },
    **{
        f"graphs.load_{name}": calls(name=_name)
        for name in ("facebook", "heterophilous", "tu")
    },
}


def learner(task: str, output: int, *metrics: str, more: str = "") -> Strategy:
    """A module that learns from batches of two graphs, with ``more`` attributes."""

    def batch(d: Draw) -> Arg:
        nodes = max(d.nodes, 1)
        passed = f"{data_source(d, nodes)[:-1]}, {more.format(n=nodes)})"
        return Arg(f"data.ToDiffusionGraph()([{passed}, {passed}])", NOT_DATA).without(
            "empty"
        )

    model = module(f"mp.DiffusionGNN(3, 4, {output}, task='{task}')")
    return calls(
        "made({batch})",
        model=model,
        metric=texts(*metrics),
        batch=batch,
    )


def task_metric(d: Draw) -> None:
    name = d.pick(["acc", "macro_f1", "roc_auc", "ap", "mse", "mae"])
    if name in ("mse", "mae"):
        passed = "torch.randn(6), torch.randn(6)"
    else:
        passed = "torch.randn(6, 2), torch.arange(6) % 2"
    d.call(
        "metric",
        "train.TaskMetric({args})",
        metric=Arg(repr(name), choice(d, name).wrong),
    )
    d.call("out", f"metric({passed})")


def node_cross_entropy(d: Draw) -> None:
    n = d.pick([4, 1, 7])
    wrong = not_integers(
        str(n),
        f"beyond the classes: torch.full(({n},), 9) | no label: torch.full(({n},), -1) | None | an array",
        f"a dict | a list | too long: torch.zeros({n + 1}).long() | of rank two: torch.zeros({n}, 2).long()",
        f"a column?: torch.zeros({n}, 1).long()",
    )
    logits = Arg(f"torch.randn({n}, 3)", wrong_tensors(n, 3)).without(
        "a longer last dimension"
    )
    target = Arg(f"torch.zeros({n}).long()", wrong).without("a sparse tensor")
    d.call("out", "train.node_cross_entropy({args})", logits=logits, target=target)


def multi_label_loss(d: Draw) -> None:
    n = d.pick([4, 1, 7])
    wrong = bad(
        "None",
        f"beyond 1: torch.full(({n}, 2), 9) | no label: torch.full(({n}, 2), -1)",
        f"another shape: torch.zeros({n}, 5)",
    )
    target = Arg(f"torch.ones({n}, 2)", NOT_A_TENSOR + wrong)
    d.call(
        "out",
        "train.multi_label_loss({args})",
        logits=Arg(f"torch.randn({n}, 2)", wrong_tensors(n, 2)),
        target=target,
    )


def mean_squared_error(d: Draw) -> None:
    n = d.pick([4, 1, 7])
    kept = {w.what for w in NOT_A_TENSOR} | {"None", "complex", "a sparse tensor"}
    target = Arg(f"torch.randn({n})", [w for w in wrong_tensors(n) if w.what in kept])
    prediction = Arg(f"torch.randn({n})", wrong_tensors(n)).without("integers", "bools")
    d.call(
        "out", "train.mean_squared_error({args})", prediction=prediction, target=target
    )


def planetoid_module(d: Draw) -> None:
    part = options(d, "'random'", "'public'", "3", wrong=NOT_A_SEED, optional=True)
    special = {
        "name": choice(d, "Cora", "PubMed"),
        "split": part,
        "tuning": replace(
            flag(d), valid=True if part.right == "3" else None
        ),  # which a random split does not know
    }
    construct(d, "module", leave="download", **special)
    d.call("out", "module.data")


def load_checkpoint(d: Draw) -> None:
    path = written(
        "b.ckpt",
        "a folder: '.' | no file: 'absent.ckpt' | an address: 'http://a/b.ckpt'",
    )
    d.call("saved", "train.save_checkpoint({'a': torch.ones(2)}, 'b.ckpt')")
    d.call("out", "train.load_checkpoint({args})", path=path)


UNNAMED = calls("made.num_features", leave="train val")
NAMED = calls("made.num_features", leave="train val", name=_name)
TRAIN: dict[str, Strategy] = {
    "train.save_checkpoint": calls(
        state=Arg("{'a': torch.ones(2)}"),
        path=written("a.ckpt", "a folder: '.'"),
    ),
    "train.load_checkpoint": load_checkpoint,
    "train.replace_file": calls(
        path=written("a.txt", "a folder: '.'"),
        data=Arg("b'text'", bad("a string | None | a number | a list")),
    ),
    "train.check_writable": calls(folder=written("out").without("empty")),
    "train.NodeClassifier": calls(
        "[made({data}), made.predict_step({data}, 0), made.configure_optimizers() and 0]",
        model=module("mp.GCNConv(3, 2)"),
        metric=texts("acc", "roc_auc"),
        data=lambda d: Arg(data_source(d), NOT_DATA).without("empty"),
    ),
    "train.SequenceClassifier": calls(
        "made(torch.ones(2, 5, 3))",
        model=module("mp.PDETransformer(3, 4, 2, 1, 2, max_length=9)"),
        warmup=numbers(0.1, 0.0, zero=True, below="1.0"),
    ),
    "train.node_cross_entropy": node_cross_entropy,
    "train.mean_squared_error": mean_squared_error,
    "train.weighted_accuracy": calls(
        "made(torch.randn(5, made.num_classes), torch.zeros(5).long())",
        num_classes=lambda d: replace(
            sizes := count(d, 3, 2), wrong=sizes.wrong + bad("one: 1")
        ),
    ),
    "train.multi_label_loss": multi_label_loss,
    "train.GraphClassifier": learner("graph", 2, "acc", "roc_auc"),
    "train.LinkPredictor": calls(
        "[made.configure_optimizers() and 0]",
        model=module("mp.DiffusionGNN(3, 4, 2, task='link')"),
        metric=texts("roc_auc", "ap"),
    ),
    "train.Forecaster": learner("node", 1, "mse", "mae", more="base=torch.zeros({n})"),
    "train.TaskMetric": task_metric,
    "train.FacebookDataModule": NAMED,
    "train.HeterophilousDataModule": NAMED,
    "train.TUDataModule": NAMED,
    "train.KNNDataModule": UNNAMED,
    "train.OgbDataModule": UNNAMED,
    "train.SnapshotDataModule": UNNAMED,
    "train.SynMolDataModule": UNNAMED,
    "train.DigitsDataModule": calls("made.data.x"),
    "train.RowsDataModule": calls(
        "made.data.x", name=lambda d: choice(d, "iris 30%", "rings 5%", optional=True)
    ),
    "train.PlanetoidDataModule": planetoid_module,
}

ONE_RANK = (
    "torch.distributed.is_initialized() or torch.distributed.init_process_group("
    "'gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)"
)


def sharded_graph(d: Draw) -> None:
    n = d.nodes = max(d.nodes, 1)  # every rank has a node
    passed = edges(d, objects=False)
    d.call("ranks", ONE_RANK)
    listed = replace(
        passed["edge_index"],
        wrong=[w for w in passed["edge_index"].wrong if "graph" not in w.what],
    )
    d.call(
        "graph",
        "distributed.ShardedGraph({args})",
        edge_index=listed,
        edge_weight=passed["edge_weight"],
        num_nodes=fixed(n, *count(d, zero=True).wrong),
        device=replace(device(d).without("a list"), optional=True),
    )
    d.call("out", "[graph.degree(), graph.rows, graph.total(torch.ones(2))]")


def node_parallel(d: Draw) -> None:
    d.call("ranks", ONE_RANK)
    group = never(bad("a string: 'group' | a list: [0]"))
    d.call(
        "out",
        "distributed.node_parallel({args})",
        model=module("nn.Linear(2, 2)"),
        group=group,
    )


DISTRIBUTED: dict[str, Strategy] = {
    "distributed.ShardedGraph": sharded_graph,
    "distributed.node_parallel": node_parallel,
}
