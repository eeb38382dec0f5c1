"""Models and data of users' own, on a ring of eight nodes, some with a flaw."""

import operator
from typing import ClassVar

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch_geometric.data import Data

NODES = torch.arange(8)
EVERY = torch.ones(8, dtype=torch.bool)
MASKS = {"train_mask": EVERY, "val_mask": EVERY, "test_mask": EVERY}


class Linear(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.linear = nn.Linear(in_channels, out_channels)

    def forward(self, x, edge_index, edge_weight=None):
        return self.linear(x)


class FeaturesOnly(Linear):
    def forward(self, x):
        return self.linear(x)


class TwoResults(Linear):
    def forward(self, x, edge_index, edge_weight=None):
        return self.linear(x), x


class OneNumber(Linear):
    def forward(self, x, edge_index, edge_weight=None):
        return self.linear(x).mean()


class OtherNames(nn.Module):
    def __init__(self, features: int, classes: int):
        super().__init__()
        self.linear = nn.Linear(features, classes)

    def forward(self, x, edge_index):
        return self.linear(x)


class WithoutArguments(OtherNames):
    def __init__(self):
        super().__init__(3, 2)


class Unmeasured(pl.LightningDataModule):
    changes: ClassVar[dict[str, object]] = {}

    def train_dataloader(self):
        parts = {"y": NODES % 2, "x": torch.ones(8, 3), **MASKS, **self.changes}
        data = Data(edge_index=torch.stack([NODES, (NODES + 1) % 8]), **parts)
        return DataLoader([data], collate_fn=operator.itemgetter(0))

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Ring(Unmeasured):
    num_features = 3
    num_classes = 2


def changed(name, **changes):
    return type(name, (Ring,), {"changes": changes, "__module__": __name__})


Indices = changed("Indices", train_mask=NODES[:3], val_mask=NODES[3:])
NoTrainMask = changed("NoTrainMask", train_mask=None)
NoValMask = changed("NoValMask", val_mask=None)
NoTestMask = changed("NoTestMask", test_mask=None)
ListMask = changed("ListMask", train_mask=[True] * 8)
FloatMask = changed("FloatMask", train_mask=torch.ones(8))
WideMask = changed("WideMask", train_mask=torch.ones(8, 4, dtype=torch.bool))
ShortMask = changed("ShortMask", train_mask=EVERY[:5])
NoLabels = changed("NoLabels", y=None)
FloatLabels = changed("FloatLabels", y=torch.ones(8))
FewLabels = changed("FewLabels", y=NODES[:5] % 2)
NoFeatures = changed("NoFeatures", x=None, num_nodes=8)


class Pairs(Ring):
    def train_dataloader(self):
        return DataLoader(
            [(torch.ones(8, 3), NODES % 2)], collate_fn=operator.itemgetter(0)
        )

    val_dataloader = test_dataloader = train_dataloader


class TextWidth(Ring):
    num_features = "3"


class NoWidth(Ring):
    num_features = None
