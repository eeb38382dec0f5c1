"""The tutorials, pages whose blocks run one after the other: what they print and draw comes from here.

python -m tests.pages.tutorials rows nodes    # from the root, all by default: writes outputs and pictures anew

Data sets are read from DIFFUSION_MP_DATA, by default data/.
"""

import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from diffusion_mp.testing.laws import seeded

from .blocks import ROOT, TUTORIALS

BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n.*?```\n)?", re.S)


def run(page: Path, data: Path, **constants: int) -> tuple[str, dict[str, object]]:
    """Run a page in the working directory; return it with what its blocks print below them, and their names."""
    scope: dict[str, object] = {"__name__": page.stem}
    for name, folder in {"data": data, "zoo": ROOT / "zoo"}.items():
        Path(name).symlink_to(folder.absolute())

    def with_output(block: re.Match[str]) -> str:
        code = re.sub(
            r"(?m)^(\w+) = (\d+)$",
            lambda at: f"{at[1]} = {constants.get(at[1], at[2])}",
            block[1],
        )
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, page.stem, "exec"), scope)
        output = printed.getvalue()
        return f"```python\n{block[1]}```\n" + (
            f"\n```text\n{output}```\n" if output else ""
        )

    with seeded(0):
        return BLOCK.sub(with_output, page.read_text()), scope


if __name__ == "__main__":
    data = Path(os.environ.get("DIFFUSION_MP_DATA", "data")).absolute()
    images = ROOT / "docs/images"
    for page in (
        page for page in TUTORIALS if page.stem in (sys.argv[1:] or page.stem)
    ):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            page.write_text(run(page, data)[0])
            for picture in Path(folder).glob("tutorial-*.png"):
                shutil.move(picture, images / picture.name)
