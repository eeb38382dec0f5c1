"""Labels in a column [N, 1], as node sets of OGB have them, and masks that are indices of nodes, as PyG takes them."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from diffusion_mp import DiffusionClassifier, LabelPropagation
from diffusion_mp.data import (
    RandomPartitionLoader,
    Split,
    label_mask,
    random_split,
    random_split_per_class,
)
from diffusion_mp_experiments.graphs.node_sets import visible_labels
from diffusion_mp_experiments.train import NodeClassifier
from diffusion_mp_experiments.train.metrics import TaskMetric
from helpers import randn, refuses

N = 20
Y = torch.arange(N) % 3
EDGES = torch.randint(0, N, (2, 60), generator=torch.Generator().manual_seed(0))
KNOWN = torch.arange(N) < 10
LOGITS = randn(N, 3).float()


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def of_data(y: Tensor) -> Split:
    return Split.of(Data(y=y, train_mask=KNOWN, val_mask=~KNOWN, test_mask=~KNOWN))


def score(metric: str) -> Callable[[Tensor], Tensor]:
    def compute(y: Tensor) -> Tensor:
        measure = TaskMetric(metric)
        measure.update(LOGITS, y)
        return measure.compute()

    return compute


def loss(y: Tensor) -> Tensor:
    module = NodeClassifier(torch.nn.Identity())
    module.forward = lambda data: LOGITS  # type: ignore[method-assign]
    logits, labels = module.compared(
        Data(y=y, train_mask=KNOWN, num_nodes=len(LOGITS)), "train"
    )
    return module.loss(logits, labels)


def fitted(y: Tensor) -> Any:
    features = LOGITS.double().numpy()
    model = DiffusionClassifier(rounds=1, max_iter=2, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # of a column, as other estimators of scikit-learn warn
        model.fit(features, y.numpy())
    return model.predict(features), model.score(features, y.numpy())


TAKERS: dict[str, Callable[[Tensor], Any]] = {
    "LabelPropagation": lambda y: LabelPropagation(3, 0.9)(y, EDGES, mask=KNOWN),
    "the limit": lambda y: LabelPropagation(None, 0.9)(
        y, torch.cat([EDGES, EDGES.flip(0)], 1), mask=KNOWN
    ),
    "label_mask": label_mask,
    "random_split": lambda y: random_split(y, 0.5, 0.2, seeded()),
    "random_split_per_class": lambda y: random_split_per_class(y, 2, 3, 4, seeded()),
    "Split.of": of_data,
    "visible_labels": lambda y: visible_labels(y, True),
    "accuracy": score("acc"),
    "F1": score("macro_f1"),
    "ROC": score("roc_auc"),
    "AP": score("ap"),
    "the loss": loss,
    "the estimator": fitted,
}


#: These take the labels that torch's losses take.
AS_LOSSES = ["accuracy", "F1", "ROC", "AP", "the loss", "visible_labels"]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(equal, a, b))
    return np.array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.uint16])
def test_a_column_of_labels_is_a_vector_of_them(taker, dtype):
    if dtype != torch.int64 and taker in AS_LOSSES:
        return
    take = TAKERS[taker]
    assert equal(take(Y.to(dtype).unsqueeze(1)), take(Y))


def test_unlabelled_nodes_of_a_column():
    y = Y.clone()
    y[::4] = -1
    for take in (
        label_mask,
        TAKERS["random_split"],
        TAKERS["LabelPropagation"],
        TAKERS["visible_labels"],
    ):
        assert equal(take(y.unsqueeze(1)), take(y))


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "a mask": lambda mask: mask,
    "a column": lambda mask: mask.unsqueeze(1),
    "indices": lambda mask: mask.nonzero().flatten(),
    "unsorted indices": lambda mask: mask.nonzero().flatten().flip(0),
    "a column of indices": lambda mask: mask.nonzero(),
    "short indices": lambda mask: mask.nonzero().flatten().int(),
    "an array": lambda mask: mask.nonzero().flatten().numpy(),
    "a list": lambda mask: mask.nonzero().flatten().tolist(),
    "a list of bools": lambda mask: mask.tolist(),
    "an array of bools": lambda mask: mask.numpy(),
}


# Lists and arrays are taken, though the annotation says tensors.
@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize("form", FORMS)
def test_masks_may_be_indices(form):
    model = LabelPropagation(3, 0.9)
    for count in (0, 1, 10, N):
        mask = torch.arange(N) < count
        same = FORMS[form](mask)
        assert torch.equal(model(Y, EDGES, mask=same), model(Y, EDGES, mask=mask))
        split = Split.of(Data(y=Y, train_mask=same, val_mask=~mask, test_mask=~mask))
        assert torch.equal(split.train, mask)


def test_a_column_mask_of_the_loader():
    data = Data(x=LOGITS, edge_index=EDGES, train_mask=KNOWN.unsqueeze(1))
    assert all(bool(batch.train_mask.any()) for batch in RandomPartitionLoader(data, 4))


def spread(y: Any, **options: Any) -> Callable[[], Tensor]:
    return lambda: LabelPropagation(3)(y, EDGES, **options)


test_what_is_neither_is_refused = refuses(
    (spread(Y, mask=torch.tensor([-1])), ValueError, "mask"),
    (spread(Y, mask=KNOWN.byte()), TypeError, "mask"),
    (spread(Y, mask=KNOWN[:5]), ValueError, "mask"),
)
