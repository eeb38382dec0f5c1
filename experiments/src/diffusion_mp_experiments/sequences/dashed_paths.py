"""Dashed paths in a square that keep their distance from each other."""

from __future__ import annotations

import math
from random import Random
from typing import NamedTuple

Point = tuple[float, float]  # (row, column); pixel (i, j) is the unit square from the point (i, j) to (i + 1, j + 1)

_BESIDE = 7.0  # pixels between the beginnings of two paths, if one is to begin beside the other
_NEAR = 13  # pixels at a squared distance below this from a path are not free
_REACH = 3  # the largest whole number whose square is below it
_PADDING = 2  # pixels at the border that stay empty
_STEP, _DASH, _PERIOD = 0.5, 4, 7  # pixels; steps of a dash (2 pixels); steps of a dash and its gap (1.5 pixels)
_TURN = 60  # degrees to either side, from one dash to the next
_HEADINGS = 12  # tried before a path is given up
# Rounded, so that the last bit of a machine's cosine does not show.
_UNIT = [
    (round(math.sin(a) * 2**20) / 2**20, round(math.cos(a) * 2**20) / 2**20) for a in map(math.radians, range(360))
]


class DashedPath(NamedTuple):
    """Dashes in order, and the points along dashes and gaps, half a pixel apart."""

    dashes: list[tuple[Point, Point]]
    points: list[Point]

    @property
    def beginning(self) -> Point:
        """Where the first dash begins."""
        return self.points[0]

    @property
    def end(self) -> Point:
        """Where the last dash ends."""
        return self.points[-1]


class Room:
    """The pixels of a square that a path may still enter.

    A pixel is taken when it lies at the border, or less than √13 ≈ 3.6 pixels (between centres) from one with a point
    of a path. So two paths are at least √13 − √2 ≈ 2.2 pixels apart and their pixels never touch, while those of one
    path are connected, its points being half a pixel apart.
    """

    def __init__(self, size: int) -> None:
        edge, inside = _REACH + _PADDING, size - 2 * _PADDING
        self._size, self._width = size, inside + 2 * edge
        self._origin = _REACH * (self._width + 1)
        wall, line = b"\1" * edge, b"\1" * self._width
        self._taken = bytearray(line * edge + (wall + bytes(inside) + wall) * inside + line * edge)
        reach = range(-_REACH, _REACH + 1)
        self._near = [i * self._width + j for i in reach for j in reach if i * i + j * j < _NEAR]

    def path(self, random: Random, dashes: int, tries: int, beside: Point | None = None) -> DashedPath | None:
        """Grows a path through what is free and takes its room; None, and the room is as before, if all tries fail.

        It begins anywhere, or 7 pixels from `beside` in any direction. Every dash turns by a uniform angle of at most
        60°; one that would enter a taken pixel, or come as near to its own path three dashes back, is drawn again.
        """
        for _ in range(tries):
            beginning = random.random() * self._size, random.random() * self._size
            if beside is not None:
                down, right = _UNIT[int(random.random() * 360)]
                beginning = beside[0] + _BESIDE * down, beside[1] + _BESIDE * right
            if all(0 <= place < self._size for place in beginning) and not self._taken[self._cell(*beginning)]:
                path = self._grow(random, beginning, dashes)
                if path is not None:
                    return path
        return None

    def _grow(self, random: Random, point: Point, dashes: int) -> DashedPath | None:
        taken, lines = bytearray(self._taken), list[list[Point]]()
        heading = int(random.random() * 360)
        for number in range(dashes):
            steps = _PERIOD if number < dashes - 1 else _DASH  # no gap after the last
            for _ in range(_HEADINGS):
                angle = (heading + int(random.random() * (2 * _TURN + 1)) - _TURN) % 360
                line = self._free_line(taken, point, angle, steps)
                if line:
                    break
            else:
                return None
            lines.append(line)
            heading, point = angle, line[-1]
            if number >= 2:
                self._take(taken, lines[number - 2])
        for line in lines[-2:]:
            self._take(taken, line)
        self._taken = taken
        return DashedPath([(line[0], line[_DASH]) for line in lines], [point for line in lines for point in line])

    def _free_line(self, taken: bytearray, point: Point, angle: int, steps: int) -> list[Point]:
        """The points of a line if all of them are free, else none."""
        (row, column), (down, right), line = point, _UNIT[angle], list[Point]()
        for _ in range(steps + 1):
            if taken[self._cell(row, column)]:
                return []
            line.append((row, column))
            row, column = row + _STEP * down, column + _STEP * right
        return line

    def _take(self, taken: bytearray, line: list[Point]) -> None:
        for cell in {self._cell(*point) for point in line}:
            for offset in self._near:
                taken[cell + offset] = 1

    def _cell(self, row: float, column: float) -> int:
        return self._origin + int(row) * self._width + int(column)
