"""A Pathfinder-like task without a download: are the two discs on one path?"""

import math
from dataclasses import KW_ONLY
from functools import cache
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, UInt8
from numpy.typing import NDArray
from torch import Tensor

from diffusion_mp.checks import Count, CountOrZero
from diffusion_mp_experiments.sequences.dataset import DrawnDataset, Item
from diffusion_mp_experiments.settings import settings

_SIZES = {"train": 160_000, "val": 20_000, "test": 20_000}
_HALF_WIDTH = 0.25
_DISC = 1.5
_CONTRAST = 0.75
_TRIES = 20
_SHORT_TRIES = 60
_SCENES = 1_000
# (row, column); pixel (i, j) is the unit square from the point (i, j) to (i + 1, j + 1).
Point = tuple[float, float]
Pixel = tuple[int, int]

_BESIDE = 7.0  # pixels between the beginnings of two paths, if one is to begin beside the other
_PADDING = 2  # pixels at the border that stay empty
# pixels; steps of a dash (2 pixels); steps of a dash and its gap (1.5 pixels)
_STEP = 0.5
_DASH = 4
_PERIOD = 7
_TURN = 60  # degrees to either side, from one dash to the next
_HEADINGS = 12  # tried before a path is given up
# Rounded, so that the last bit of a machine's cosine does not show.
_UNIT = [
    (round(math.sin(a) * 2**20) / 2**20, round(math.cos(a) * 2**20) / 2**20)
    for a in map(math.radians, range(360))
]


class Scene(NamedTuple):
    """An image, its label, its paths without gaps and discs, and the two pixels (row, column) of the discs."""

    image: UInt8[Tensor, "S S"]
    label: int
    solid: Bool[Tensor, "S S"]
    ends: tuple[Pixel, ...]


class DashedPath(NamedTuple):
    """Dashes in order, and the points along dashes and gaps, half a pixel apart."""

    dashes: list[tuple[Point, Point]]
    points: list[Point]


@settings
class Pathfinder(DrawnDataset):
    """Images of dashed paths with a disc at two ends; the label is 1 if both discs lie on the same path, else 0.

    The task follows Linsley et al. (2018), in the size of the Long Range Arena (Tay et al. 2021): 32 × 32 pixels, two
    long paths of 14 dashes that begin 7 pixels apart, up to five short paths of 4 dashes to distract (two fit on
    average), and discs of radius 1.5. The drawing is our own: dashes of 2 pixels and gaps of 1.5, turns of at most 60°
    between dashes. Paths are more than 2 pixels apart, so that the gaps within a path are shorter than the gaps between
    paths.

    Item i is of class i mod 2. The class decides only which ends get a disc: the beginning of one path and the end of
    the same path or of the other path. So the ink is the same. Item i depends only on `seed`, split, i and the
    parameters, and nothing is stored. Tokens are the grey values in the order of rows; `scene(i)` has the image.

    Args:
        split: "train", "val" or "test".
        num: number of items. By default the Arena's 160 000/20 000/20 000.
        seed: draws everything.
        size: number of pixels of a side, at least 24. The default 32 is the Arena's.
        dashes: number of dashes of a long path, 14 for "hard" and 6 for "easy". Access raises RuntimeError if two such
            paths do not fit.
        distractors: largest number of short paths; there are fewer if they do not fit.
        distractor_dashes: number of dashes of a short path.

    Shapes:
        tokens: [size²] of int64 in 0–255.
        label: 0 or 1.

    Examples:
        >>> item = Pathfinder(num=2, size=24, dashes=6, distractors=1)[0]
    """

    vocabulary = 256
    classes = 2
    sizes = _SIZES

    _: KW_ONLY
    size: Count = 32
    dashes: Count = 14
    distractors: CountOrZero = 5
    distractor_dashes: Count = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 24:
            raise ValueError(
                f"size must be at least 24 pixels for two paths; got {self.size}."
            )

    def item(self, index: int) -> Item:
        """Return the grey values of image `index`, row after row, and its class."""
        scene = self.scene(index)
        return scene.image.flatten().long(), scene.label

    def scene(self, index: int) -> Scene:
        """Return image `index`, its class, and what the image does not show."""
        random = self.random(index)
        paths = self._paths(random)
        label = int(index) % 2
        first = int(random.random() * 2)
        ends = paths[first].points[0], paths[first if label else 1 - first].points[-1]

        solid = torch.zeros(self.size, self.size, dtype=torch.bool)
        rows, columns = torch.tensor([each for path in paths for each in path.points]).T
        solid[rows.long(), columns.long()] = True
        image = torch.from_numpy(_draw(self.size, paths, ends))
        return Scene(image, label, solid, tuple(map(_pixel, ends)))

    def _paths(self, random: Random) -> list[DashedPath]:
        for _ in range(_SCENES):
            room = _Room(self.size)
            one = room.path(random, self.dashes, _TRIES)
            other = one and room.path(
                random, self.dashes, _TRIES, neighbour=one.points[0]
            )
            if one and other:
                short = (
                    room.path(random, self.distractor_dashes, _SHORT_TRIES)
                    for _ in range(self.distractors)
                )
                return [one, other, *(path for path in short if path)]
        raise RuntimeError(
            f"Two paths of {self.dashes} dashes do not fit into {self.size} pixels; take fewer."
        )


def _draw(
    size: int, paths: list[DashedPath], ends: tuple[Point, ...]
) -> NDArray[np.uint8]:
    """Return grey values 0–255: every pixel is as bright as the nearest dash or disc makes it, edges one pixel soft."""
    # [P, 2, 2, 1]: from and to, row and column
    dashes = np.array([dash for path in paths for dash in path.dashes])[..., None]
    start = dashes[:, 0]
    down, right = (dashes[:, 1] - start).swapaxes(0, 1)
    # The centres of the pixels, and [P, size²] how far they are from the beginning of a dash.
    rows, columns = np.indices((size, size)).reshape(2, -1) + 0.5
    row = rows - start[:, 0]
    column = columns - start[:, 1]
    # The nearest point of a dash is at this share of its length, or at an end.
    share = (row * down + column * right) / (down**2 + right**2)
    share = share.clip(0, 1)
    square = ((row - share * down) ** 2 + (column - share * right) ** 2).min(axis=0)
    lines = _CONTRAST * (_HALF_WIDTH + 0.5 - np.sqrt(square)).clip(0, 1)
    discs = [
        _DISC + 0.5 - np.sqrt((rows - row) ** 2 + (columns - column) ** 2)
        for row, column in ends
    ]
    grey = np.maximum(lines, np.max(discs, axis=0).clip(0, 1))
    return np.floor(255 * grey + 0.5).astype(np.uint8).reshape(size, size)


def _pixel(point: Point) -> Pixel:
    row, column = point
    return int(row), int(column)


class _Room:
    """The pixels of a square that a path may still enter.

    A pixel is not free at the border, or less than √13 ≈ 3.6 pixels (between centres) from a pixel with a point of a
    path. So two paths are at least √13 − √2 ≈ 2.2 pixels apart and never touch, while the pixels of one path are
    connected.
    """

    def __init__(self, size: int) -> None:
        inside = range(_PADDING, size - _PADDING)
        self._size = size
        self._free = {(row, column) for row in inside for column in inside}

    def path(
        self, random: Random, dashes: int, tries: int, neighbour: Point | None = None
    ) -> DashedPath | None:
        """Grow a path through free pixels and take them; None, without a change, if all tries fail.

        The path begins anywhere, or 7 pixels from `neighbour` in any direction. Every dash turns by a uniform angle of
        at most 60°. A dash that leaves the free pixels, or comes as near to its own path three dashes back, is drawn
        again.
        """
        for _ in range(tries):
            # Drawn even if it is not used: the order of the numbers is part of what a seed stands for.
            beginning = random.random() * self._size, random.random() * self._size
            if neighbour is not None:
                down, right = _UNIT[int(random.random() * 360)]
                beginning = (
                    neighbour[0] + _BESIDE * down,
                    neighbour[1] + _BESIDE * right,
                )
            if _pixel(beginning) in self._free:
                path = self._grow(random, beginning, dashes)
                if path is not None:
                    return path
        return None

    def _grow(self, random: Random, point: Point, dashes: int) -> DashedPath | None:
        free = set(self._free)
        lines = list[list[Point]]()
        heading = int(random.random() * 360)
        for number in range(dashes):
            steps = _PERIOD if number < dashes - 1 else _DASH  # no gap after the last
            for _ in range(_HEADINGS):
                angle = (heading + int(random.random() * (2 * _TURN + 1)) - _TURN) % 360
                line = _free_line(free, point, _UNIT[angle], steps)
                if line:
                    break
            else:
                return None
            lines.append(line)
            heading = angle
            point = line[-1]
            # A dash may touch the two before it, to which it is joined.
            if number >= 2:
                free.difference_update(*map(_near, lines[number - 2]))
        for line in lines[-2:]:
            free.difference_update(*map(_near, line))
        self._free = free
        return DashedPath(
            [(line[0], line[_DASH]) for line in lines],
            [point for line in lines for point in line],
        )


def _free_line(
    free: set[Pixel], point: Point, direction: Point, steps: int
) -> list[Point]:
    """Return the points of a dash and its gap, or no points if one of them is not free."""
    row, column = point
    line = list[Point]()
    for _ in range(steps + 1):
        if (int(row), int(column)) not in free:
            return []
        line.append((row, column))
        # Added up, not multiplied: the last bit decides a pixel, and so what a seed draws.
        row += _STEP * direction[0]
        column += _STEP * direction[1]
    return line


def _near(point: Point) -> frozenset[Pixel]:
    """Return the pixels that a path with this point makes not free."""
    return _around(_pixel(point))


@cache
def _around(pixel: Pixel) -> frozenset[Pixel]:
    row, column = pixel
    reach = range(-3, 4)
    return frozenset(
        (row + i, column + j) for i in reach for j in reach if i * i + j * j < 13
    )
