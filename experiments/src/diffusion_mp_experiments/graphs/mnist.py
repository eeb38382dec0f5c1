"""MNIST as features and labels of nodes; `KNNGraph` joins them."""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data

from diffusion_mp.errors import check_counts
from diffusion_mp_experiments.files.reading import as_path, check_present, reading

_IMAGES, _LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
_MOST = 60_000
_SIDE = 28
_WAY_OUT = "Fetch it anew; PyTorch's torchvision.datasets.MNIST downloads it to this place."


def load_mnist(root: str | Path, num_images: int = 15_000) -> Data:
    """The first images of MNIST's training set (LeCun et al. 1998), as published, without edges.

    15 000 of them are what Wu, Wipf & Yan (2025, Table 6) work with.

    Args:
        root: the folder that holds `raw/train-images-idx3-ubyte.gz` and `raw/train-labels-idx1-ubyte.gz`.
        num_images: how many, up to 60 000.

    Returns:
        x [num_images, 784] in [0, 1] and y [num_images] in 0..9.

    Raises:
        TypeError, ValueError: `num_images` is no whole number or out of range, or a file is damaged.
        FileNotFoundError: files are missing; the sentence says which.

    Examples:
        >>> import gzip, struct
        >>> images = struct.pack(">4I", 2051, 1, 28, 28) + bytes(784)
        >>> labels = struct.pack(">2I", 2049, 1) + bytes([7])
        >>> (folder / "raw").mkdir()
        >>> for kind, content in {"images-idx3": images, "labels-idx1": labels}.items():
        ...     _ = (folder / "raw" / f"train-{kind}-ubyte.gz").write_bytes(gzip.compress(content))
        >>> load_mnist(folder, num_images=1)
        Data(x=[1, 784], y=[1])
    """
    check_counts(num_images=num_images)
    if num_images > _MOST:
        raise ValueError(f"num_images must be at most {_MOST}, got {num_images}.")
    raw = as_path(root, "root") / "raw"
    check_present("MNIST", raw, [raw / _IMAGES, raw / _LABELS], _WAY_OUT.replace("Fetch it anew;", "Put it there;"))
    x, y = _array(raw / _IMAGES, (num_images, _SIDE, _SIDE)), _array(raw / _LABELS, (num_images,))
    if int(y.max()) > 9:
        raise ValueError(f"{raw / _LABELS}: it has a label {int(y.max())}, and digits end at 9. {_WAY_OUT}")
    return Data(x=x.flatten(1).float() / 255, y=y.long())


def _array(path: Path, shape: tuple[int, ...]) -> Tensor:
    """The beginning of an array of bytes in LeCun's format: a magic number, the sizes, the numbers row by row."""
    with reading(path, _WAY_OUT), gzip.open(path) as file:
        magic, count, *sizes = struct.unpack(f">{1 + len(shape)}I", file.read(4 * (1 + len(shape))))
        if magic != 0x800 + len(shape) or tuple(sizes) != shape[1:] or count < shape[0]:
            raise ValueError(f"its header says {count} × {sizes}, type {magic:#x}; expected {shape} bytes or more")
        content = file.read(math.prod(shape))
        if len(content) < math.prod(shape):
            raise ValueError(f"it ends after {len(content)} of {math.prod(shape)} bytes")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(shape)
