"""A user's data, in every form that is read, and a sentence for every kind that is not."""

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from rdkit import RDLogger
from safetensors.torch import save_file
from torch_geometric.data import Batch, Data, HeteroData, InMemoryDataset
from torch_geometric.utils import to_undirected

from diffusion_mp_experiments.compare import tables
from diffusion_mp_experiments.compare.data import prepared
from diffusion_mp_experiments.compare.inputs import MASKS, read, read_more
from diffusion_mp_experiments.compare.problem import Problem
from diffusion_mp_experiments.graphs import load_heterophilous, load_planetoid, load_tu
from helpers import Payload
from small_sets import make_heterophilous, make_tu, write

RDLogger.DisableLog("rdApp.*")

NODES = """id,size,city,label
n7,1.5,Rome,cat
x 2,NA,Bonn,dog
10,2.5,Rome,
n9,2,,cat
"""
EDGES = "source,target\nn7,x 2\n10,n7\n"


def made(folder: Path, nodes: str | bytes = NODES, edges: str | bytes = EDGES) -> Path:
    write(folder, {"nodes.csv": nodes, "edges.csv": edges})
    return folder


def table(folder: Path, text: str | bytes) -> Path:
    return write(folder, {"table.csv": text})[0]


def small() -> Data:
    """A ring of six nodes, each edge in both directions."""
    ring = torch.stack([torch.arange(6), torch.arange(1, 7) % 6])
    return Data(
        x=torch.arange(12.0).view(6, 2),
        edge_index=to_undirected(ring),
        y=torch.tensor([0, 1, 0, 1, 1, -1]),
    )


def masked() -> Data:
    data = small()
    position = torch.tensor([0, 0, 1, 1, 2, 2])
    for number, name in enumerate(MASKS):
        data[name] = position == number
    return data


def graph_list() -> list[Data]:
    graphs = []
    for size, y in ((2, 0), (3, 1), (1, 0), (2, 1)):
        path = torch.stack([torch.arange(size - 1), torch.arange(1, size)])
        graphs.append(
            Data(
                x=torch.full((size, 2), float(size)),
                edge_index=to_undirected(path, num_nodes=size),
                y=torch.tensor([y]),
            )
        )
    return graphs


def check_same(found: Problem, expected: Problem) -> None:
    assert len(found.graphs) == len(expected.graphs)
    for one, other in zip(found.graphs, expected.graphs, strict=True):
        assert one.keys() == other.keys()
        for key in one.keys():  # noqa: SIM118 of PyG, a method
            assert one[key].dtype == other[key].dtype
            assert torch.equal(one[key], other[key])
    for field in ("task", "classes", "names", "directed", "notes"):
        assert getattr(found, field) == getattr(expected, field)
    assert (found.split is None) == (expected.split is None)
    for one, other in zip(found.split or (), expected.split or (), strict=True):
        assert torch.equal(one, other)


def test_nodes_and_edges(tmp_path):
    problem = read(made(tmp_path))
    (data,) = problem.graphs
    assert (problem.task, problem.classes) == ("node", ("cat", "dog"))
    assert problem.names == ("n7", "x 2", "10", "n9")
    assert data.y.tolist() == [0, 1, -1, 0]
    # Whether the size is missing, the size, and no city, Bonn and Rome.
    assert data.x.tolist() == [
        [0, 1.5, 0, 0, 1],
        [1, 2.0, 0, 1, 0],
        [0, 2.5, 0, 0, 1],
        [0, 2.0, 1, 0, 0],
    ]
    assert data.x.dtype == torch.float64
    assert data.edge_index.tolist() == [[0, 0, 1, 2], [1, 2, 0, 0]]
    assert not problem.directed
    said = " ".join(problem.notes)
    assert "1 missing numbers of the column size became its mean" in said
    assert (
        "The column city became 3 indicator columns, one of them for missing." in said
    )
    assert "in both directions, also the 2 that are listed in one only" in said
    assert 'the column "label" is unknown for 1 of 4' in said
    assert "has classes with a single example: 'dog'" in said
    (tmp_path / "edges.csv").rename(tmp_path / "pairs.csv")
    others = read(tmp_path / "nodes.csv", edges=tmp_path / "pairs.csv")
    check_same(others, problem)
    assert "edge_index" not in read(tmp_path / "nodes.csv").graphs[0]


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + NODES,
        NODES.replace("\n", "\r\n"),
        NODES.replace(",", ";"),
        NODES.replace(",", "\t"),
        NODES.replace("x 2", '"x 2"'),
        NODES.replace("\n", "\n\n"),
        NODES.replace("NA", "inf"),
        NODES.replace("NA", "1e300"),
    ],
)
def test_the_same_table_in_other_words(tmp_path, text):
    problem = read(made(tmp_path))
    check_same(read(made(tmp_path, text)), problem)


@pytest.mark.parametrize("names", ["src,dst", "to,from", "FROM,TO", "a,b", "index"])
def test_the_ends_of_edges_go_by_their_names(tmp_path, names):
    edges = f"{names}\nn7,n9\n"
    if names == "index":
        # As pandas writes it.
        edges = ",a,b\n0,n7,n9\n"
    problem = read(made(tmp_path, edges=edges), directed=True)
    ends = problem.graphs[0].edge_index.flatten().tolist()
    assert ends == ([3, 0] if names == "to,from" else [0, 3])
    assert problem.directed


def test_weights_and_features_of_edges(tmp_path):
    edges = "kind,weight,source,target,days\na,1,n7,n9,4\nb,3,n9,n7,6\na,2,10,10,1\na,2,10,10,1\n"
    problem = read(made(tmp_path, edges=edges))
    (data,) = problem.graphs
    assert data.edge_index.tolist() == [[0, 2, 3], [3, 2, 0]]
    # Edges of both directions get the mean, and none counts twice.
    assert data.edge_weight.tolist() == [2, 2, 2]
    assert data.edge_attr.tolist() == [[0.5, 0.5, 5], [1, 0, 1], [0.5, 0.5, 5]]
    said = " ".join(problem.notes)
    assert "1 of 4 edges were duplicates" in said
    assert "1 of the edges are self-loops, which were kept" in said
    directed = read(tmp_path, directed=True)
    assert directed.graphs[0].edge_weight.tolist() == [1, 2, 3]


def test_links_need_no_label(tmp_path):
    problem = read(made(tmp_path), task="link")
    assert (problem.task, problem.classes) == ("link", ())
    assert "y" not in problem.graphs[0]
    assert problem.graphs[0].num_features == 5
    assert "The column label was left out." in problem.notes
    without = "id\nn7\nx 2\n10\n"
    problem = read(made(tmp_path, without), task="link")
    assert problem.graphs[0].x.tolist() == [[1], [1], [1]]
    assert "There are no features, so a constant takes their place." in problem.notes
    assert read(small(), task="link").graphs[0].y is None


def test_rows(tmp_path):
    text = "a,b,target\n1,x,0.5\n2,x,NA\n3,y,2\n"
    problem = read(table(tmp_path, text))
    (data,) = problem.graphs
    assert (problem.task, problem.classes) == ("node", ())
    assert problem.names == ("0", "1", "2")
    assert data.edge_index is None
    assert data.y.dtype == torch.float64
    assert data.y[[0, 2]].tolist() == [0.5, 2]
    assert data.y.isnan().tolist() == [False, True, False]
    assert read(table(tmp_path, text), target="b").classes == ("x", "y")
    assert read(table(tmp_path, text), identifier="a").names == ("1", "2", "3")
    marked = read(table(tmp_path, "\ufeffy,a\n0,1\n1,2\n"))
    assert marked.classes == ("0", "1")


@pytest.mark.parametrize(
    ("values", "task", "classes"),
    [
        (["1", "2", "1", "2"], None, ("1", "2")),
        (["1.0", "10", "2", "1"], None, ("1", "2", "10")),
        (["1", "2", "1", "2"], "regression", ()),
        (["0.5", "1.5", "0.5", "1.5"], None, ()),
        (["0.5", "1.5", "0.5", "1.5"], "node", ("0.5", "1.5")),
        (["True", "False", "", "True"], None, ("False", "True")),
        ([*map(str, range(21))] * 2, None, ()),
        ([*map(str, range(21))] * 2, "node", tuple(map(str, range(21)))),
    ],
)
def test_what_is_a_class(tmp_path, values, task, classes):
    rows = "".join(f"{value},1\n" for value in values)
    problem = read(table(tmp_path, "Class,a\n" + rows), task=task)
    assert problem.classes == classes
    number = problem.graphs[0].y.dtype == torch.float64
    assert number == (not classes)
    hint = any("whole numbers" in note for note in problem.notes)
    assert hint == (number and len(values) > 20)


def test_new_rows_are_encoded_as_the_compared_ones(tmp_path):
    text = "id,size,city,label\na,1,Oslo,x\nb,,Rome,y\nc,3,,x\nd,4,Oslo,y\n"
    problem = read(table(tmp_path, text))
    # As saved, without the order of columns, with others, and without a label.
    problem.save(tmp_path / "problem.npz")
    problem = Problem.load(tmp_path / "problem.npz")
    new = write(tmp_path, {"new.csv": "city,more,size\nRome,1,2\nParis,2,\n,3,8\n"})[0]
    with pytest.warns(UserWarning, match="\"city\" has texts that .* have, 'Paris'"):
        (new,), names = read_more(new, problem)
    assert names == ["0", "1", "2"]
    # Indicators of missing sizes, sizes, and of no city, Oslo and Rome.
    mean = 8 / 3
    expected = torch.tensor([[0, 2, 0, 0, 1], [1, mean, 0, 0, 0], [0, 8, 1, 0, 0]])
    torch.testing.assert_close(new.x, expected.double())
    with pytest.raises(ValueError, match=r"has no column 'size'; a column of the"):
        read_more(write(tmp_path, {"new.csv": "city\nRome\n"})[0], problem)
    with pytest.raises(ValueError, match='"size" must hold numbers, as in the'):
        read_more(write(tmp_path, {"new.csv": "size,city\nlong,Rome\n"})[0], problem)
    with pytest.raises(ValueError, match=r"data must be a table .csv; got 'new.npz'"):
        read_more("new.npz", problem)
    with pytest.raises(FileNotFoundError):
        read_more(tmp_path / "absent.csv", problem)
    with pytest.raises(ValueError, match="edges must be left out"):
        read_more(new, problem, write(tmp_path, {"ends.csv": "a,b\n0,1\n"})[0])
    with pytest.raises(ValueError, match="directed is for the edges of one graph"):
        read(table(tmp_path, text), directed=True)
    graph = Data(x=torch.rand(4, 2), y=torch.tensor([0, 1, 0, 1]))
    with pytest.raises(ValueError, match="is for problems that were read from a table"):
        read_more(tmp_path / "new.csv", read([graph]))


def test_new_nodes_come_with_their_edges(tmp_path):
    (tmp_path / "nodes.csv").write_text("id,size,label\na,1,x\nb,2,y\nc,3,x\n")
    (tmp_path / "edges.csv").write_text("source,target,kind\na,b,near\nb,c,far\n")
    problem = read(tmp_path)
    new = tmp_path / "new"
    new.mkdir()
    (new / "nodes.csv").write_text("id,size\nu,5\nv,6\n")
    with pytest.raises(ValueError, match="edges must be the table of the edges"):
        read_more(new / "nodes.csv", problem)
    (new / "edges.csv").write_text("source,target,kind\nv,u,far\n")
    (graph,), names = read_more(new, problem)
    assert names == ["u", "v"]
    assert graph.x.tolist() == [[5], [6]]
    assert graph.edge_index.tolist() == [[0, 1], [1, 0]]
    assert graph.edge_attr.tolist() == [[1, 0], [1, 0]]


def test_columns_that_are_left_out(tmp_path):
    rows = "".join(f"word{i},{i % 50},,{i % 2}\n" for i in range(51))
    problem = read(table(tmp_path, "a,b,c,y\n" + rows))
    assert problem.graphs[0].x[:, 0].tolist() == [i % 50 for i in range(51)]
    assert problem.graphs[0].num_features == 1
    assert problem.notes == (
        "The column a has the ids of the rows, since every row has another text. If there are edges between them, give "
        "the table of these with edges= (--edges).",
        "The column c was left out: it is empty.",
    )
    assert problem.names[:2] == ("word0", "word1")
    new = write(tmp_path, {"new.csv": "a,b,c\nanna,1,\nbo,2,\n"})[0]
    assert read_more(new, problem)[1] == ["anna", "bo"]
    # A text that is not in the first column may be anything.
    problem = read(
        table(
            tmp_path, "b,y,a\n" + "".join(f"{i},{i % 2},word{i}\n" for i in range(51))
        )
    )
    assert problem.names[:2] == ("0", "1")
    assert "a was left out: it is text with 51 different values." in problem.notes[0]


SMILES = "{},note,label\nCCO,1,a\nnot one,2,b\nC1=CC=CC=C1,3,b\nC,4,a\n"


@pytest.mark.parametrize("name", ["smiles", "SMILES"])
def test_molecules(tmp_path, name):
    problem = read(table(tmp_path, SMILES.format(name)))
    assert (problem.task, problem.classes) == ("graph", ("a", "b"))
    assert problem.names == ("CCO", "C1=CC=CC=C1", "C")
    assert [graph.num_nodes for graph in problem.graphs] == [3, 6, 1]
    assert [graph.num_edges for graph in problem.graphs] == [4, 12, 0]
    assert [graph.y.tolist() for graph in problem.graphs] == [[0], [1], [0]]
    x = torch.cat([graph.x for graph in problem.graphs])
    # One kind of each of the nine properties of an atom.
    assert set(x.flatten().tolist()) == {0, 1}
    assert x.sum(1).eq(9).all()
    assert problem.graphs[0].edge_attr.sum(1).eq(3).all()
    said = " ".join(problem.notes)
    assert "1 rows that are no molecules were left out: 'not one'." in said
    assert "The columns 'note' were left out beside" in said


def test_molecules_are_known_by_their_values(tmp_path):
    text = "compound,y\nCCO,0.5\nCCN,1.5\nCCC,2.25\n"
    problem = read(table(tmp_path, text))
    assert (problem.task, problem.classes) == ("graph", ())
    assert [graph.y.item() for graph in problem.graphs] == [0.5, 1.5, 2.25]
    categories = "element,y\nC,0.5\nN,1.5\nC,2.25\n"
    assert read(table(tmp_path, categories)).task == "node"


def test_molecules_without_rdkit(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rdkit", None)
    monkeypatch.setattr(tables, "find_spec", lambda name: None)
    said = r"needs rdkit, .*pip install 'diffusion-mp-experiments\[molecules\]'"
    with pytest.raises(ModuleNotFoundError, match=said):
        read(table(tmp_path, SMILES.format("smiles")))
    assert read(table(tmp_path, "compound,y\nCCO,0.5\nCCN,1.5\n")).task == "node"


def test_tensors(tmp_path):
    expected = read(masked())
    (data,) = expected.graphs
    assert (expected.task, expected.classes) == ("node", ("0", "1"))
    assert torch.equal(data.x, small().x)
    assert torch.equal(data.edge_index, small().edge_index)
    assert data.y.tolist() == [0, 1, 0, 1, 1, -1]
    assert [mask.tolist() for mask in expected.split] == [
        masked()[name].tolist() for name in MASKS
    ]
    fields = masked().to_dict()
    torch.save(masked(), tmp_path / "one.pt")
    torch.save([masked()], tmp_path / "list.pt")
    torch.save(fields, tmp_path / "dict.pt")
    save_file(fields, tmp_path / "one.safetensors")
    np.savez(tmp_path / "one.npz", **{name: fields[name].numpy() for name in fields})
    files = ["one.pt", "list.pt", "dict.pt", "one.safetensors", "one.npz"]
    for name in files:
        found = read(tmp_path / name)
        check_same(found, Problem(**{**vars(expected), "notes": found.notes}))
        assert len(found.notes) == 1


def test_labels_of_tensors():
    data = small()
    data.y = torch.tensor([5, 70, 5, 70, -1, 70])[:, None]
    problem = read(data)
    assert problem.classes == ("5", "70")
    assert problem.graphs[0].y.tolist() == [0, 1, 0, 1, -1, 1]
    data.other = torch.tensor([0.5, float("nan"), 1, 2, 3, 4])
    problem = read(data, target="other")
    assert problem.classes == ()
    assert problem.graphs[0].y.isnan().tolist() == [False, True] + [False] * 4
    data.y = torch.arange(6)
    problem = read(data, task="regression")
    assert problem.graphs[0].y.tolist() == [0, 1, 2, 3, 4, 5]


def test_directions_of_tensors():
    data = small()
    data.edge_index = torch.tensor([[0, 1, 1, 2], [1, 2, 2, 2]])
    data.edge_weight = torch.tensor([1.0, 2, 4, 5])
    data.edge_attr = torch.tensor([1.0, 2, 4, 5])
    problem = read(data)
    assert problem.directed
    assert problem.graphs[0].edge_index.tolist() == [[0, 1, 2], [1, 2, 2]]
    assert problem.graphs[0].edge_weight.tolist() == [1, 3, 5]
    assert problem.graphs[0].edge_attr.tolist() == [[1], [3], [5]]
    assert any("is directed; directed=False adds" in note for note in problem.notes)
    problem = read(data, directed=False)
    assert problem.graphs[0].edge_index.tolist() == [[0, 1, 1, 2, 2], [1, 0, 2, 1, 2]]
    assert not problem.directed
    assert data.num_edges == 4


def test_the_data_of_the_caller_stay_as_they_are():
    data = small()
    data.x.requires_grad_()
    before = data.to_dict()
    problem = read(data)
    assert not problem.graphs[0].x.requires_grad
    assert data.x.requires_grad
    assert set(data.keys()) == set(before)
    assert all(data[name] is before[name] for name in before)


def test_a_column_of_train_val_and_test_is_the_split(tmp_path: Path) -> None:
    lines = ["size,Split,label", "1,train,a", "2,Valid,b", "3,test,a", "4,,b"]
    problem = read(table(tmp_path, "\n".join(lines)))
    expected = [[row == part for row in range(4)] for part in range(3)]
    assert problem.split is not None
    assert [mask.tolist() for mask in problem.split] == expected
    assert problem.graphs[0].x.tolist() == [[1], [2], [3], [4]]
    molecules = ["smiles,split,label", "CCO,test,1", "no molecule,test,0"]
    molecules += ["CCN,train,0", "CCC,val,1"]
    problem = read(table(tmp_path, "\n".join(molecules)))
    assert problem.split is not None
    assert [mask.tolist() for mask in problem.split] == [
        [False, True, False],
        [False, False, True],
        [True, False, False],
    ]
    without = "\n".join(lines).replace("Valid", "train")
    problem = read(table(tmp_path, without))
    assert problem.split is None
    assert "split" in problem.notes[0].lower()
    # Other words are features.
    problem = read(table(tmp_path, without.replace("train", "left")))
    assert problem.graphs[0].num_features > 1


def test_masks_of_several_splits():
    data = masked()
    data.train_mask = torch.stack(
        [data.train_mask, ~(data.val_mask | data.test_mask)], 1
    )
    data.val_mask = data.val_mask[:, None]
    problem = read(data)
    assert [mask.shape for mask in problem.split] == [(6, 2)] * 3
    assert problem.split[2][:, 1].tolist() == masked().test_mask.tolist()
    del data.val_mask
    problem = read(data)
    assert problem.split is None
    assert any("a split needs" in note for note in problem.notes)


def test_several_graphs(tmp_path):
    problem = read(graph_list())
    assert (problem.task, problem.classes) == ("graph", ("0", "1"))
    assert problem.names == ("0", "1", "2", "3")
    assert [graph.y.tolist() for graph in problem.graphs] == [[0], [1], [0], [1]]
    torch.save(graph_list(), tmp_path / "graphs.pt")
    dataset = InMemoryDataset()
    dataset.data, dataset.slices = dataset.collate(graph_list())
    for source in (
        tmp_path / "graphs.pt",
        str(tmp_path / "graphs.pt"),
        dataset,
        tuple(graph_list()),
        Batch.from_data_list(graph_list()),
    ):
        check_same(
            read(source), Problem(**{**vars(problem), "notes": read(source).notes})
        )
    graphs = graph_list()
    for graph, y in zip(graphs, (0.5, None, 1.5, 2.5), strict=True):
        graph.y = y
        graph.x = None
    problem = read(graphs)
    assert problem.classes == ()
    assert problem.graphs[1].y.isnan().all()
    assert problem.graphs[3].x.tolist() == [[1], [1]]


def test_published_files(tmp_path):
    make_heterophilous(tmp_path)
    problem = read(tmp_path / "small.npz")
    expected = load_heterophilous(tmp_path, "small")
    for name in ("x", "edge_index", "y"):
        assert torch.equal(problem.graphs[0][name], expected[name])
    for mask, name in zip(problem.split, MASKS, strict=True):
        assert torch.equal(mask, expected[name])
    make_tu(tmp_path)
    for folder in (tmp_path / "SMALL", tmp_path / "SMALL" / "raw"):
        problem = read(folder)
        assert problem.classes == ("-1", "1")
        for graph, same in zip(problem.graphs, load_tu(tmp_path, "SMALL"), strict=True):
            for name in ("x", "edge_index", "edge_attr", "y"):
                assert torch.equal(graph[name], same[name])
    (tmp_path / "SMALL" / "raw" / "SMALL_node_labels.txt").unlink()
    xs = [graph.x.tolist() for graph in read(tmp_path / "SMALL").graphs]
    assert xs == [[[1]] * 3, [[1]], [[1]] * 2]


@pytest.mark.parametrize("form", ["nodes", "rows", "links", "tensors", "graphs"])
def test_a_problem_survives_its_file(tmp_path, form):
    if form in ("nodes", "links"):
        problem = read(made(tmp_path), task="link" if form == "links" else None)
    elif form == "rows":
        problem = read(table(tmp_path, "a,y\n1,ä\n2,b\n"))
    elif form == "tensors":
        problem = read(masked(), directed=True)
    else:
        problem = read(graph_list())
        parts = torch.eye(4, dtype=torch.bool)[:3]
        problem = Problem(**{**vars(problem), "split": tuple(parts)})
    problem.save(tmp_path / "problem.npz")
    check_same(Problem.load(tmp_path / "problem.npz"), problem)
    check_same(read(tmp_path / "problem.npz"), problem)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("x", torch.tensor([[0.0, np.nan]] * 6).numpy()),
        ("x", np.ones((5, 2), np.float32)),
        ("x.sizes", np.array([5])),
        ("edge_index", np.full((2, 12), 6)),
        ("y", np.array([0, 1, 2, 0, 0, 0])),
        ("y.sizes", np.array([3, 3])),
        ("split", np.ones((3, 5), bool)),
        ("problem", np.frombuffer(b"{}", np.uint8)),
        ("problem", np.frombuffer(b"\xff{", np.uint8)),
        ("x", np.array([{}], object)),
    ],
)
def test_damaged_problems_are_refused(tmp_path, field, value):
    path = tmp_path / "problem.npz"
    read(masked()).save(path)
    arrays = dict(np.load(path))
    assert field in arrays
    np.savez(path, **{**arrays, field: value})
    with pytest.raises(ValueError, match=re.escape(f"{path}: ")):
        Problem.load(path)


def test_parts_of_a_problem_are_refused(tmp_path):
    path = tmp_path / "problem.npz"
    problem = read(masked())
    problem.save(path)
    content = path.read_bytes()
    for end in (0, 10, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:end])
        with pytest.raises(ValueError, match=re.escape(str(path))):
            Problem.load(path)
    with pytest.raises(FileNotFoundError, match="missing no"):
        Problem.load(tmp_path / "no.npz")


REFUSED_TABLES = [
    (b"", "no rows below a line of names"),
    ("a,y\n", "no rows below a line of names"),
    (b"a,y\n\xff\xfe,1\n", r"UnicodeDecodeError: .*Save the table as text in UTF-8"),
    (b"a,y\n\0,1\n", "zero bytes"),
    ("a,a,y\n1,2,3\n", "several of its columns are named 'a'"),
    ("a,y\n1,2\n3\n", "row 2 has 1 cells below 2 names of columns"),
    ('a,y\n"1,2\n3', "unexpected end of data"),
    ("a,b\n1,2\n", "must have one column named label.*has 0; .*'a', 'b'"),
    ("y,label\n1,2\n", "must have one column named label.*has 2; "),
    ("a,y\n1,\n2,NA\n", 'the column "y" must have at least two .*no value is known'),
    ("a,y\n1,b\n2,b\n", "at least two different values, but all known ones are b"),
    (
        "a,y\n1,0.5\n2,0.5\n",
        "at least two different values, but all known ones are 0.5",
    ),
    ("a,y\n1,2\n", "at least two different values"),
    ("id,y\nb,1\nb,2\n", "ids in the column \"id\" must all be different.*'b' several"),
    ("id,y\nb,1\n,2\n", "must all be different, and there are rows without one"),
    (
        "a,y\n" + "".join(f"1,w{i}\n" for i in range(100_000)),
        'has 100000 different values, and classes may be at most 1000 here; .*"regression"',
    ),
    ("smiles,y\nxx,1\nyy,2\n", 'none of the column "smiles" is a molecule'),
]


@pytest.mark.parametrize(("text", "said"), REFUSED_TABLES)
def test_refused_tables(tmp_path, text, said):
    path = table(tmp_path, text)
    with pytest.raises(ValueError, match=said) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("edges", "said"),
    [
        ("source,target\nn7,q\nz,n9\n", "2 are not: 'q', 'z'; add them there"),
        ("n7,n9\nn9,10\n", r"must begin with a line of names, such as source,target"),
        ("source\nn7\n", "must begin with a line of names"),
        ("source,target\n", "no rows below a line of names"),
        (
            "source,target,weight\nn7,n9,-1\n",
            'the column "weight" must hold numbers >= 0',
        ),
        (
            "source,target,weight\nn7,n9,\n",
            'the column "weight" must hold numbers >= 0',
        ),
    ],
)
def test_refused_edges(tmp_path, edges, said):
    with pytest.raises(ValueError, match=said) as caught:
        read(made(tmp_path, edges=edges))
    assert str(caught.value).startswith(str(tmp_path / "edges.csv"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"target": "size_"},
            "no column 'size_'; target must be one of 'size', 'city',",
        ),
        ({"identifier": "i"}, "no column 'i'; identifier must be one of 'id', 'size'"),
        (
            {"task": "graph"},
            "task must be one of 'node', 'link', 'regression' for nodes",
        ),
        ({"task": "nodes"}, "task must be one of None, 'node'"),
        (
            {"task": "regression"},
            "must hold numbers for task=\"regression\"; got 'cat'",
        ),
    ],
)
def test_refused_arguments_for_tables(tmp_path, arguments, said):
    with pytest.raises(ValueError, match=said):
        read(made(tmp_path), **arguments)


def changed(**fields) -> Data:
    data = small()
    data.update(fields)
    return data


def overlapping(first: str, other: str) -> Data:
    data = masked()
    data[first] = data[first] | data[other]
    return data


def removed(name: str) -> Data:
    data = small()
    delattr(data, name)
    return data


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (changed(x=torch.full((6, 2), float("inf"))), "x must be finite"),
        (changed(x=torch.ones(6)), "x must have two dimensions"),
        (changed(edge_index=torch.tensor([[0, 6], [6, 0]])), "edge_index must lie in"),
        (changed(edge_index=torch.tensor([[0, -1], [1, 0]])), "edge_index must lie in"),
        (changed(edge_index=small().edge_index.t()), "If it is transposed"),
        (changed(edge_attr=torch.ones(5, 2)), "edge_attr must have one row"),
        (changed(edge_weight=torch.full((12,), np.nan)), "edge_weight must be finite"),
        (changed(y=torch.ones(6, 3)), r"one label for each of 6 nodes.*\[6, 3\]"),
        (changed(y=torch.ones(5)), "one label for each of 6 nodes"),
        (
            changed(y=torch.tensor([1, 1, 1, -1, -1, -1])),
            "all known ones are 1; .*-1 means",
        ),
        (changed(y=torch.full((6,), -1)), "no value is known"),
        (removed("y"), "source has no y; .*one of 'edge_index', 'x', or"),
        *(
            (overlapping(first, other), "must not share a node")
            for first, other in combinations(MASKS, 2)
        ),
        (
            changed(**dict.fromkeys(MASKS, torch.ones(5, dtype=torch.bool))),
            r"masks must be \[6\] or \[6, splits\], with one number of splits; got",
        ),
        (
            changed(
                train_mask=torch.ones(6, 2, dtype=torch.bool),
                val_mask=torch.zeros(6, 3, dtype=torch.bool),
                test_mask=torch.zeros(6, 1, dtype=torch.bool),
            ),
            "with one number of splits; got",
        ),
        ([], "got several kinds, or no graph at all"),
        ([*graph_list(), small()], r"graph 4: y must be one label of the graph"),
        ([*graph_list(), Data(x=torch.ones(2, 3), y=1)], "got several kinds"),
        (
            [*graph_list(), Data(x=torch.full((2, 2), np.nan), y=1)],
            "graph 4: x must be f",
        ),
    ],
)
def test_refused_tensors(source, said):
    with pytest.raises(ValueError, match=said):
        read(source)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (None, "source must be a Data, a list of Data, or a path"),
        (3, "source must be a Data, a list of Data, or a path"),
        (HeteroData(), "to_homogeneous"),
        ([small(), 3], "graph 1 must be a Data of PyG; got 3"),
    ],
)
def test_refused_objects(source, said):
    with pytest.raises(TypeError, match=said):
        read(source)


def test_tasks_that_do_not_fit(tmp_path):
    with pytest.raises(ValueError, match="for graphs"):
        read(graph_list(), task="node")
    with pytest.raises(ValueError, match=r"for rows .a link needs edges"):
        read(removed("edge_index"), task="link")
    with pytest.raises(ValueError, match="directed is for the edges of one graph"):
        read(graph_list(), directed=True)
    for name in ("edges", "identifier"):
        with pytest.raises(
            ValueError, match="edges and identifier are for tables only"
        ):
            read(small(), **{name: "a"})
    read(small()).save(tmp_path / "a.npz")
    with pytest.raises(ValueError, match="is a problem that was read before"):
        read(tmp_path / "a.npz", target="y")


def test_refused_files(tmp_path):
    def refused(name: str, said: str, kind: type = ValueError, **options) -> None:
        with pytest.raises(kind, match=said) as caught:
            read(tmp_path / name, **options)
        assert str(tmp_path) in str(caught.value)

    write(tmp_path, {"a.xlsx": b"PK", "edges.csv": EDGES, "folder/nodes.txt": b""})
    refused("a.xlsx", "it must be a table .csv, a folder")
    refused("folder", "one NAME_A.txt of TUDataset, and holds 0 of these")
    refused("edges.csv", "is the table of edges; give the table of the nodes")
    refused("none.csv", "missing none.csv", FileNotFoundError)
    refused("none.pt", "missing none.pt", FileNotFoundError)
    table(tmp_path, NODES)
    way_out = {"edges": tmp_path / "no.csv"}
    refused("table.csv", "missing no.csv", FileNotFoundError, **way_out)
    marker = tmp_path / "marker"
    torch.save({"x": Payload(marker)}, tmp_path / "evil.pt")
    refused("evil.pt", "nothing in it was run")
    np.savez(tmp_path / "evil.npz", x=np.array([Payload(marker)], object))
    refused("evil.npz", "allow_pickle=False")
    assert not marker.exists()
    for name in ("cut.pt", "cut.npz", "cut.safetensors"):
        (tmp_path / name).write_bytes(b"PK\3\4")
        refused(name, "Write it anew|write it anew")
    np.savez(tmp_path / "nan.npz", x=np.array([[np.nan], [1]]), y=np.array([0, 1]))
    refused("nan.npz", "nan.npz: x must be finite; 1 of its 2")


def test_a_column_named_id_comes_before_a_nameless_index(tmp_path):
    nodes = ",id,x,label\n0,a,1,u\n1,b,2,v\n"
    problem = read(made(tmp_path, nodes, "source,target\na,b\n"))
    assert problem.names == ("a", "b")
    assert problem.graphs[0].x.tolist() == [[1], [2]]
    assert any("column without a name was left out" in note for note in problem.notes)
    assert read(table(tmp_path, "node,ID,y\n1,a,0\n1,b,1\n")).names == ("a", "b")
    assert read(table(tmp_path, ",x,y\na,1,0\nb,2,1\n")).names == ("a", "b")


@pytest.mark.parametrize("names", ["source_id,target_id", "src_id,dst_id", "U,V"])
def test_more_names_of_the_ends_of_edges(tmp_path, names):
    problem = read(made(tmp_path, edges=f"edge_id,{names}\n10,n7,n9\n"), directed=True)
    assert problem.graphs[0].edge_index.flatten().tolist() == [0, 3]
    assert not any("ends of edges" in note for note in problem.notes)


def test_ends_that_are_only_the_first_columns_are_named(tmp_path):
    problem = read(made(tmp_path, edges="w,a,b\n10,n7,n9\n"))
    assert any(
        "The ends of edges are the first two columns, 'w', 'a'" in n
        for n in problem.notes
    )
    said = (
        r"the columns 'w', 'a' must hold ids .* 1 are not: '0.5';.* source and target"
    )
    with pytest.raises(ValueError, match=said):
        read(made(tmp_path, edges="w,a,b\n0.5,n7,n9\n"))


@pytest.mark.parametrize(
    ("values", "task", "classes"),
    [
        (["1_0", "10", "1_0", "10"], None, ("10", "1_0")),
        (["01", "1", "1", "2"], None, ("01", "1", "2")),
        (["007", "008", "007", "008"], None, ("007", "008")),
        (
            ["9007199254740993", "9007199254740992"] * 2,
            None,
            ("9007199254740992", "9007199254740993"),
        ),
        (["1.50", "2.0", "1.5", "2"], "node", ("1.5", "2")),
        (["01", "1.50", "1.5", "2"], None, ()),
        (["01", "1", "inf", "2"], "regression", ()),
    ],
)
def test_different_texts_are_different_classes(tmp_path, values, task, classes):
    rows = "".join(f"{value},1\n" for value in values)
    problem = read(table(tmp_path, "y,a\n" + rows), task=task)
    assert problem.classes == classes


def test_signs_and_none_are_classes_like_others(tmp_path):
    for values in (["+", "-"] * 4, ["none", "mild"] * 4):
        rows = "".join(f"{value},{i}\n" for i, value in enumerate(values))
        assert set(read(table(tmp_path, "y,a\n" + rows)).classes) == {*values}


def test_times_that_differ_by_seconds_stay_different(tmp_path):
    rows = "".join(f"{1_700_000_000 + i},{1_700_000_000.5 + i}\n" for i in range(40))
    problem = read(table(tmp_path, "t,y\n" + rows))
    (graph,) = prepared(problem.graphs, problem)
    assert len(graph.x.unique()) == 40
    assert graph.x.dtype == torch.float32
    assert len(problem.graphs[0].y.unique()) == 40


@pytest.mark.parametrize("missing", ["", "nan", "None", "NA", None, np.nan])
def test_missing_labels_are_no_class(tmp_path, missing):
    data = small()
    data.y = ["a", "b", "a", "b", missing, "a"]
    problem = read(data)
    assert problem.classes == ("a", "b")
    assert problem.graphs[0].y.tolist() == [0, 1, 0, 1, -1, 0]
    fields = {name: data[name].numpy() for name in ("x", "edge_index")}
    np.savez(tmp_path / "text.npz", y=np.array(data.y, str), **fields)
    check_same(read(tmp_path / "text.npz"), problem)
    rows = "".join(f"{missing},1\n" for missing in (*data.y[:4], missing or ""))
    assert read(table(tmp_path, "y,a\n" + rows)).classes == ("a", "b")


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["a", "b", "a", None], ("a", "b")),
        ([3, 5, -1, None], ("3", "5")),
        ([True, False, True, None], ("False", "True")),
        ([0.5, 1.5, float("nan"), None], ()),
    ],
)
def test_graphs_without_a_label(labels, classes):
    graphs = graph_list()
    for graph, label in zip(graphs, labels, strict=True):
        graph.y = label
    problem = read(graphs)
    assert problem.classes == classes
    known = [bool(graph.y >= 0) for graph in problem.graphs]
    assert known == [True, True, labels[2] in ("a", True), False]


def test_labels_of_other_kinds():
    y = torch.tensor([0.5, 1.5, 2, 1, 0.5, 0.5])
    assert read(changed(y=y.bfloat16())).graphs[0].y.tolist() == y.tolist()
    for y in (torch.ones(6) * 1j, np.array([{}, 1, "a", 0, 0, 0], object)):
        with pytest.raises(ValueError, match="y must hold numbers, bools or text; got"):
            read(changed(y=y))
    graphs = graph_list()
    graphs[0].y = torch.tensor([1j])
    graphs[1].y = torch.tensor([1.0]).bfloat16()
    with pytest.raises(ValueError, match="y must hold numbers, bools or text; got 1j"):
        read(graphs)


@pytest.mark.parametrize("before", ["", "\n\n", " \n"])
def test_tabs_with_a_nameless_first_column(tmp_path, before):
    problem = read(table(tmp_path, before + "\tlabel\na\t0\nb\t1\n"))
    assert problem.names == ("a", "b")


@pytest.mark.parametrize("weighted", [True, False])
def test_new_edges_have_weights_if_the_compared_ones_had_some(tmp_path, weighted):
    texts = ["source,target,weight\nn7,n9,2\n", "source,target\nn7,n9\n"]
    if not weighted:
        texts.reverse()
    problem = read(made(tmp_path, edges=texts[0]))
    problem.save(tmp_path / "problem.npz")
    problem = Problem.load(tmp_path / "problem.npz")
    assert read_more(tmp_path, problem)[0][0].num_edges == 2
    made(tmp_path, edges=texts[1])
    said = "edges.csv must have a column named weight" if weighted else "no column of w"
    with pytest.raises(ValueError, match=said):
        read_more(tmp_path, problem)
    # As problems were saved before.
    del problem.encoding["weighted"]
    read_more(tmp_path, problem)


@pytest.mark.parametrize("missing", ["#N/A", "-", ".", "None", "<NA>"])
def test_words_for_what_is_missing(tmp_path, missing):
    problem = read(table(tmp_path, f"a,y\n1,0.5\n{missing},1.5\n3,{missing}\n"))
    assert problem.graphs[0].x.tolist() == [[0, 1], [1, 2], [0, 3]]
    assert problem.graphs[0].y.isnan().tolist() == [False, False, True]


def test_decimal_commas_between_semicolons(tmp_path):
    text = "id;a;b;y\n1;0,5;x,y;1,5\n2;-1,25;z;2,25\n3;2;z;\n"
    problem = read(table(tmp_path, text))
    assert problem.classes == ()
    assert problem.graphs[0].y[:2].tolist() == [1.5, 2.25]
    assert problem.graphs[0].x[:, 0].tolist() == [0.5, -1.25, 2]
    assert problem.graphs[0].num_features == 3
    assert read(table(tmp_path, text.replace("0,5", '"0,5"'))).classes == ()


def test_numbers_with_some_other_text_are_named(tmp_path):
    rows = "".join(f"{i},{i % 2}.5,{i}\n" for i in range(1, 19))
    problem = read(table(tmp_path, "a,y,b\n" + rows + "5%,$3,\n,8,zwei\n"))
    said = "The column {} was read as text, since {} in row {} is no number."
    assert said.format("a", "'5%'", 19) in problem.notes
    assert said.format("b", "'zwei'", 20) in problem.notes
    assert said.format("y", "'$3'", 19) in problem.notes
    problem = read(table(tmp_path, "a,y\nx,1\n2,0\n3,1\n4,0\n"))
    assert problem.notes == ("The column a became 4 indicator columns.",)


def test_files_of_a_folder_go_by_their_names(tmp_path):
    made(tmp_path)
    (tmp_path / "edges.csv").rename(tmp_path / "Edges.CSV")
    (tmp_path / "nodes.csv").rename(tmp_path / "Nodes.csv")
    expected = read(tmp_path)
    assert expected.graphs[0].num_edges == 4
    check_same(read(tmp_path / "Nodes.csv"), expected)
    (tmp_path / "Edges.CSV").rename(tmp_path / "links.csv")
    said = r"and holds 'Nodes.csv', 'links.csv'; .*edges= \(--edges\)"
    with pytest.raises(ValueError, match=said):
        read(tmp_path)
    with pytest.raises(ValueError, match=said):
        read_more(tmp_path, expected)
    named = {"edges": tmp_path / "links.csv"}
    check_same(read(tmp_path, **named), expected)
    assert len(read_more(tmp_path, expected, **named)[1]) == 4
    assert read(tmp_path / "Nodes.csv").graphs[0].edge_index is None


def test_a_suffix_may_be_written_in_capitals(tmp_path):
    for name in ("A.CSV", "b.Tsv"):
        write(tmp_path, {name: "a,y\n1,0\n2,1\n"})
        assert read(tmp_path / name).classes == ("0", "1")


@pytest.mark.parametrize("rows", [9, 10])
def test_texts_that_differ_in_ten_rows_are_ids(tmp_path, rows):
    lines = "".join(f"word{i},{i},{i % 2}\n" for i in range(rows))
    problem = read(table(tmp_path, "a,b,y\n" + lines))
    assert problem.names[1] == ("1" if rows == 9 else "word1")
    assert problem.graphs[0].num_features == (10 if rows == 9 else 1)


def test_molecules_are_named_by_their_ids(tmp_path):
    text = "id,smiles,label\nm1,CCO,a\nm2,no,b\nm3,C,b\nm4,CC,a\n"
    problem = read(table(tmp_path, text))
    assert problem.names == ("m1", "m3", "m4")
    new = write(tmp_path, {"new.csv": "smiles,id\nCC,q\nCCC,r\n"})[0]
    assert read_more(new, problem)[1] == ["q", "r"]
    new.write_text("smiles\nCC\n")
    assert read_more(new, problem)[1] == ["CC"]
    # The index of pandas says less than the molecule.
    problem = read(table(tmp_path, ",smiles,label\n0,CCO,a\n1,C,b\n"))
    assert problem.names == ("CCO", "C")


def test_new_molecules_may_be_single_atoms(tmp_path):
    problem = read(table(tmp_path, SMILES.format("smiles")))
    new = write(tmp_path, {"new.csv": "smiles,more\nC,1\nO,2\n"})[0]
    graphs, _ = read_more(new, problem)
    assert [graph.edge_attr.shape for graph in graphs] == [
        (0, problem.graphs[0].num_edge_features)
    ] * 2
    assert torch.equal(graphs[0].x, problem.graphs[2].x)
    new.write_text("smiles,more\nC,1\nno,2\n")
    with pytest.raises(ValueError, match="1 rows are no molecules: 'no'; remove them"):
        read_more(new, problem)


def test_letters_are_no_molecules(tmp_path):
    problem = read(table(tmp_path, "element,y\nB,0.5\nC,1.5\nN,2.25\nCl,1\n"))
    assert problem.task == "node"


def test_two_columns_of_weights_are_refused(tmp_path):
    edges = "source,target,weight,Edge_Weight\nn7,n9,1,2\n"
    with pytest.raises(ValueError, match="several columns of weights, 'weight', 'Edge"):
        read(made(tmp_path, edges=edges))


def test_fields_that_are_left_out_are_named():
    data = masked()
    data.pos = torch.rand(6, 2)
    data.edge_type = torch.zeros(12)
    data.num_nodes = 6
    said = "The fields 'edge_type', 'pos' were left out."
    assert said in read(data).notes
    graphs = graph_list()
    assert read(graphs).notes == ()
    graphs[1].train_mask = torch.ones(3, dtype=torch.bool)
    for graph in graphs[:3]:
        graph.pos = torch.rand(len(graph.x), 2)
        graph.x = None
    graphs[3].x = torch.ones(2, 1)
    assert sorted(read(graphs).notes) == [
        "The fields 'pos' were left out.",
        "The fields 'pos', 'train_mask' were left out.",
        "There are no features, so a constant takes their place.",
    ]


def test_empty_rows(tmp_path):
    said = "2 empty rows at the end of {} were left out."
    path = table(tmp_path, "a,y\n1,0\n2,1\n,\n , \n\n")
    problem = read(path)
    assert len(problem.names) == 2
    assert said.format(path) in problem.notes
    folder = tmp_path / "graph"
    folder.mkdir()
    made(folder, NODES + ",,,\n,,,\n", EDGES + ",\n,\n")
    problem = read(folder)
    assert len(problem.names) == 4
    for name in ("nodes.csv", "edges.csv"):
        assert said.format(folder / name) in problem.notes
    with pytest.raises(ValueError, match="no rows below a line of names"):
        read(table(tmp_path, "a,y\n,\n"))
    # In one column, an empty line is a cell.
    problem = read(table(tmp_path, "a,y\n1,0\n2,1\n"))
    new = write(tmp_path, {"new.csv": "\na\n1\n\n7\n\n"})[0]
    with pytest.raises(ValueError, match="no rows below a line of names"):
        read_more(write(tmp_path, {"none.csv": "a\n\n\n"})[0], problem)
    (graph,), names = read_more(new, problem)
    assert graph.x.tolist() == [[1], [1.5], [7]]
    assert names == ["0", "1", "2"]
    frame = pd.DataFrame({"a": [1, None, 3, None]})
    assert len(read_more(frame, problem)[1]) == 4


@pytest.mark.parametrize(
    "text",
    [
        "a|b,c|y\n1|x|0\n2,5|z|1\n",
        "sep=;\na,b,c;y,z\n1;0\n2;1\n",
        '"sep=|"\r\na|y\r\n1,5|0\r\n2|1\r\n',
        "sep=\t\r\na\ty\r\n1\t0\r\n2\t1\r\n",
    ],
)
def test_other_separators(tmp_path, text):
    problem = read(table(tmp_path, text), target="y,z" if "y,z" in text else "y")
    assert problem.classes == ("0", "1")
    assert len(problem.names) == 2


def test_columns_of_a_frame_may_have_any_name(tmp_path):
    problem = read(table(tmp_path, "sep=,\na;b;c|d,y\n1,0\n2,1\n"))
    assert problem.graphs[0].x.tolist() == [[1], [2]]
    frame = pd.DataFrame({"a;b;c|d": [3]})
    assert read_more(frame, problem)[0][0].x.tolist() == [[3]]


def test_a_word_in_a_target_of_numbers_is_named_in_errors(tmp_path):
    path = table(tmp_path, "y\n" + "".join(f"{i}.5\n" for i in range(60)) + "$3\n")
    for task in (None, "regression"):
        with pytest.raises(ValueError, match=r"since '\$3' in row 61 is no number"):
            read(path, task=task)


def test_labels_of_text_and_numbers_are_refused():
    said = "y must hold either text or numbers; got 1, 'a', 2"
    with pytest.raises(ValueError, match=said):
        read(changed(y=[1, "a", None, 2, 1, "a"]))
    graphs = graph_list()
    for graph, label in zip(graphs, [1, "a", 2, 1], strict=True):
        graph.y = label
    with pytest.raises(ValueError, match=said):
        read(graphs)


@pytest.mark.data
@pytest.mark.unwatched  # checking the types of four million values takes most of a minute
def test_cora_from_tables_is_cora(data_root, tmp_path):
    data = load_planetoid(data_root / "Planetoid", "cora", normalize_features=False)
    rows, columns = data.x.shape
    names = [f"paper {number * 7}" for number in range(rows)]
    label = [f"topic {number}" for number in data.y.tolist()]
    header = ",".join(["id", *(f"w{i}" for i in range(columns)), "label"])
    body = [
        ",".join([name, *map(str, words), topic])
        for name, words, topic in zip(names, data.x.int().tolist(), label, strict=True)
    ]
    once = data.edge_index[:, data.edge_index[0] < data.edge_index[1]].t().tolist()
    pairs = [f"{names[j]},{names[i]}" for i, j in once]
    made(tmp_path, "\n".join([header, *body]), "\n".join(["from,to", *pairs]))
    problem = read(tmp_path)
    assert problem.names == tuple(names)
    assert problem.classes == tuple(f"topic {number}" for number in range(7))
    expected = data.coalesce()
    for name in ("x", "edge_index", "y"):
        assert torch.equal(problem.graphs[0][name], expected[name])
