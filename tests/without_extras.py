"""The library alone, without extras and experiments: run by test_extras.py in a process that cannot import them.

Prints, as JSON, the sentence of every library function that needs one, and the exit status and words of every example.
"""

import importlib
import io
import json
import runpy
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

EXTRAS = (
    "matplotlib",
    "sklearn",
    "pandas",
    "rdkit",
    "pymetis",
    "pytorch_lightning",
    "lightning",
    "lightning_fabric",
    "torchmetrics",
    "jsonargparse",
    "tensorboard",
    "rich",
    "PIL",
    "triton",
    "torch_scatter",
    "torch_sparse",
    "pyg_lib",
    "faiss",
    "pytest",
    "hypothesis",
    "beartype",
    "filelock",
    "huggingface_hub",
    "diffusion_mp_experiments",
)
PUBLIC = (
    "couplings",
    "data",
    "diagnostics",
    "diffusivities",
    "distributed",
    "energies",
    "errors",
    "estimators",
    "export",
    "layers",
    "models",
    "saving",
    "testing",
    "updates",
)
EXAMPLES = Path(__file__).parents[1] / "examples"

# `import rdkit` now says that there is none, and so does find_spec.
sys.modules.update(dict.fromkeys(EXTRAS))

import diffusion_mp  # noqa: E402

for package in PUBLIC:
    importlib.import_module(f"diffusion_mp.{package}")

import torch  # noqa: E402
from torch_geometric.data import Data  # noqa: E402

from diffusion_mp import estimators, plot  # noqa: E402
from diffusion_mp.data import KNNGraph, find_clusters, knn_graph  # noqa: E402
from diffusion_mp.diagnostics import PlacementReport, plot_attention  # noqa: E402


def sentence(call: Callable[[], object]) -> str:
    try:
        call()
    except ImportError as error:
        return str(error)
    return "no error"


def script(name: str, *arguments: str, run_name: str = "__main__") -> tuple[int, str]:
    sys.argv = [name, *arguments]
    status = 0
    written = io.StringIO()
    with redirect_stdout(written), redirect_stderr(written):
        try:
            runpy.run_path(str(EXAMPLES / name), run_name=run_name)
        except SystemExit as ended:
            status = (
                ended.code
                if isinstance(ended.code, int)
                else int(ended.code is not None)
            )
    return status, written.getvalue()


coupling = diffusion_mp.SimpleDiffusivity()(torch.eye(3))
graph = Data(edge_index=torch.tensor([[0, 1, 2], [1, 2, 0]]), num_nodes=3)
report = PlacementReport({"layer": ["a"], "commutator": [1.0]}, {"layer": []})
functions: dict[str, Callable[[], object]] = {
    "plot_attention": lambda: plot_attention(coupling),
    "EnergyTrace.plot": lambda: diffusion_mp.EnergyTrace(
        diffusion_mp.DIFFormerConv(3, 3)
    ).plot(),
    "plot.energies": lambda: plot.energies(torch.ones(3)),
    "PlacementReport.plot": lambda: report.plot(),
    "knn_graph": lambda: knn_graph(torch.eye(3), 1),
    "KNNGraph": lambda: KNNGraph(1)(Data(x=torch.eye(3))),
    "DiffusionClassifier": lambda: estimators.DiffusionClassifier,
    "find_clusters": lambda: find_clusters(graph, 2),
    "save_pretrained": lambda: diffusion_mp.DIFFormer(3, 3, 3).save_pretrained(
        "folder"
    ),
}
sys.path.insert(0, str(EXAMPLES))
examples = {
    "energy_descent.py": script("energy_descent.py"),
    "custom_layer.py": script("custom_layer.py", run_name="imported"),
}
for name in (
    "inside",
    "attention",
    "sfi_former",
    "pde_transformer",
    "cora",
    "pokec",
    "classifier",
    "gallery",
):
    examples[f"{name}.py"] = script(f"{name}.py", "--help")
print(
    json.dumps(
        {
            "functions": {name: sentence(call) for name, call in functions.items()},
            "examples": examples,
        }
    )
)
