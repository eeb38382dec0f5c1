"""A Pathfinder-like task without a download: are the two discs on one path?"""

from __future__ import annotations

from random import Random
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, UInt8
from numpy.typing import NDArray
from torch import Tensor

from diffusion_mp.errors import as_whole, check_choice, check_counts
from diffusion_mp_experiments.sequences.dashed_paths import DashedPath, Point, Room
from diffusion_mp_experiments.sequences.dataset import Item, SequenceDataset, check_index, item_random

_SIZES = {"train": 160_000, "val": 20_000, "test": 20_000}
_HALF_WIDTH, _DISC, _CONTRAST = 0.25, 1.5, 0.75
_TRIES, _SHORT_TRIES, _SCENES = 20, 60, 1_000


class Scene(NamedTuple):
    """An image and what it was made from."""

    image: UInt8[Tensor, "S S"]
    label: int
    solid: Bool[Tensor, "S S"]
    """The paths without gaps and discs; two paths never touch, not even at corners."""
    ends: tuple[tuple[int, int], ...]
    """The two pixels (row, column) at whose places the discs are."""


class Pathfinder(SequenceDataset):
    """Images of dashed paths, two ends marked by a disc; label 1 if both lie on the same path, else 0.

    After Linsley et al. (2018), in the size of the Long Range Arena (Tay et al. 2021): 32 × 32 pixels, two long paths
    of 14 dashes that begin 7 pixels apart, up to five short ones of 4 to distract (two fit on average), discs of radius
    1.5. It is a drawing of our own, not theirs: dashes of 2 pixels and gaps of 1.5, a turn of at most 60° from dash to
    dash, and paths more than 2 pixels apart, so that the gaps within a path are shorter than those between paths.

    Classes alternate, item i is of class i mod 2. Where the paths lie does not depend on the class: it only decides
    which ends get a disc, the beginning of one path and the end of the same or of the other. So the ink is the same.

    Item i depends on `seed`, split, i and the parameters alone, and nothing is stored. Tokens are the grey values in
    the order of rows; `scene(i)` has the image, and the paths without gaps.

    Shapes: tokens [size²] long, 0–255; label 0 or 1.

    Args:
        split: "train", "val" or "test".
        num: how many; the Arena's 160 000/20 000/20 000 by default.
        seed: draws everything.
        size: pixels of a side.
        dashes: of a long path; the Arena's "hard" has 14, its "easy" 6.
        distractors: the most short paths; fewer where they do not fit.
        distractor_dashes: of a short path.

    Raises:
        ValueError: an unknown split, a count below 1, or a size below 24.
        RuntimeError: paths of such a length do not fit (when an item is drawn).

    Examples:
        >>> item = Pathfinder(num=2, size=24, dashes=6, distractors=1)[0]
    """

    vocabulary = 256
    classes = 2

    def __init__(
        self,
        split: Literal["train", "val", "test"] = "train",
        *,
        num: int | None = None,
        seed: int = 0,
        size: int = 32,
        dashes: int = 14,
        distractors: int = 5,
        distractor_dashes: int = 4,
    ) -> None:
        check_choice(split, "split", _SIZES)
        num = _SIZES[split] if num is None else num
        check_counts(num=num, size=size, dashes=dashes, distractor_dashes=distractor_dashes)
        if as_whole(distractors, "distractors") < 0:
            raise ValueError(f"distractors must be at least 0; got {distractors}.")
        if size < 24:
            raise ValueError(f"size must be at least 24 pixels for two paths; got {size}.")
        self.split, self.seed, self.size, self._num = split, as_whole(seed, "seed"), size, num
        self.dashes, self.distractors, self.distractor_dashes = dashes, distractors, distractor_dashes

    def __len__(self) -> int:
        return self._num

    def item(self, index: int) -> Item:
        """The grey values of image `index`, row after row, and its class."""
        scene = self.scene(index)
        return scene.image.flatten().long(), scene.label

    def scene(self, index: int) -> Scene:
        """Image `index`, its class, and what the image does not show."""
        index = check_index(index, 0, self._num)
        random = item_random("pathfinder", self.seed, self.split, index)
        paths = self._paths(random)
        label, first = index % 2, int(random.random() * 2)
        ends = paths[first].beginning, paths[first if label else 1 - first].end

        solid = torch.zeros(self.size, self.size, dtype=torch.bool)
        pixels = torch.tensor([point for path in paths for point in path.points]).long()
        solid[pixels[:, 0], pixels[:, 1]] = True
        image = torch.from_numpy(_draw(self.size, paths, ends))
        return Scene(image, label, solid, tuple((int(row), int(column)) for row, column in ends))

    def _paths(self, random: Random) -> list[DashedPath]:
        """The two long paths, then the short ones that fit."""
        for _ in range(_SCENES):
            room = Room(self.size)
            one = room.path(random, self.dashes, _TRIES)
            other = one and room.path(random, self.dashes, _TRIES, beside=one.beginning)
            if one and other:
                short = (room.path(random, self.distractor_dashes, _SHORT_TRIES) for _ in range(self.distractors))
                return [one, other, *(path for path in short if path)]
        raise RuntimeError(f"Two paths of {self.dashes} dashes do not fit into {self.size} pixels; take fewer.")


def _draw(size: int, paths: list[DashedPath], ends: tuple[Point, ...]) -> NDArray[np.uint8]:
    """Grey values 0–255: every pixel is as bright as the nearest dash or disc makes it, edges one pixel soft."""
    dashes = np.array([dash for path in paths for dash in path.dashes])  # [P, 2, 2]: from, to
    start, along = dashes[:, 0, :, None], (dashes[:, 1] - dashes[:, 0])[..., None]
    rows, columns = np.divmod(np.arange(size * size), size)
    row, column = rows + 0.5 - start[:, 0], columns + 0.5 - start[:, 1]  # [P, size²], from the beginning of a dash
    share = (row * along[:, 0] + column * along[:, 1]) / (along[:, 0] ** 2 + along[:, 1] ** 2)
    share = share.clip(0, 1)
    square = ((row - share * along[:, 0]) ** 2 + (column - share * along[:, 1]) ** 2).min(axis=0)
    lines = _CONTRAST * (_HALF_WIDTH + 0.5 - np.sqrt(square)).clip(0, 1)
    discs = [_DISC + 0.5 - np.sqrt((rows + 0.5 - end[0]) ** 2 + (columns + 0.5 - end[1]) ** 2) for end in ends]
    grey = np.maximum(lines, np.max(discs, axis=0).clip(0, 1))
    return np.floor(255 * grey + 0.5).astype(np.uint8).reshape(size, size)
