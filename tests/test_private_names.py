"""No private name of torch outside the one module that says which versions have it."""

import re
from pathlib import Path

import pytest

import diffusion_mp

SOURCE = Path(diffusion_mp.__file__).parent
ALLOWED = SOURCE / "runtime" / "torch_private.py"
#: ``torch._C``, ``torch.autograd._functions``, ``from torch._ops import …``, ``from torch.autograd import _x``,
#: ``forward_ad._current_level``, ``_opoverload`` of a custom operation.
PRIVATE = re.compile(
    r"\btorch(\.\w+)*\._[a-zA-Z]|\bfrom torch[\w.]* import (\w+, )*_[a-zA-Z]|\bforward_ad\._"
    r"|\._opoverload\b|\._qualname\b"
)
FILES = sorted(
    {*SOURCE.rglob("*.py"), *(SOURCE.parents[1] / "experiments" / "src").rglob("*.py")}
)


@pytest.mark.parametrize(
    "file", FILES, ids=lambda file: file.relative_to(SOURCE.parents[1]).as_posix()
)
def test_no_private_name_of_torch(file):
    lines = enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
    found = [
        f"{file.name}:{number}: {line.strip()}"
        for number, line in lines
        if PRIVATE.search(line)
    ]
    assert file == ALLOWED or not found, "\n".join(found)


def test_private_names_are_recognised():
    for line in (
        "torch._C._any_requires_grad(x)",
        "from torch._ops import OpOverload",
        "import torch._dynamo",
        "forward_ad._current_level >= 0",
        "torch.autograd._functions",
        "out = torch._scaled_dot_product_flash_attention_for_cpu(q, k, v)",
        "from torch.utils import _pytree",
        "operation._opoverload",
    ):
        assert PRIVATE.search(line), line
    assert not PRIVATE.search("torch.nn.functional.linear(x, self._weight)")


def test_every_function_says_in_which_versions_its_private_name_was_seen():
    text = ALLOWED.read_text(encoding="utf-8")
    assert text.count("def ") == len(re.findall(r"torch 2\.6 to 2\.\d+", text))
