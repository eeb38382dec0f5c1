"""The tables and configurations of this package: the same files in a clone and in an installed wheel."""

from importlib.resources import files
from pathlib import Path


def configs_folder() -> Path:
    """Return the folder with a folder for every table, and a YAML file for every configuration of `fit`."""
    return Path(str(files("diffusion_mp_experiments"))) / "configs"


def configuration(path: str) -> str:
    """Return the path of a configuration for `diffusion-mp fit`: a file, or a file of that name in this package.

    Raises:
        FileNotFoundError: neither file exists.
    """
    # A value with a colon is the content of a configuration, which the parser accepts in the place of a path.
    if ":" in path or Path(path).expanduser().is_file():
        return path
    packaged = configs_folder() / f"{path}.yaml"
    if "/" not in path and packaged.is_file():
        return str(packaged)
    names = sorted(file.stem for file in configs_folder().glob("*.yaml"))
    # A path of a clone, `configs/cora_gcn.yaml`, names what an installed package has too.
    stem = Path(path).stem
    if stem in names:
        way_out = f"Give --config {stem}"
    else:
        way_out = f"Give the path of a file, or one of {', '.join(names)}"
    raise FileNotFoundError(
        f"--config must be a YAML file, or the name of a configuration; got {path}. {way_out}."
    )
