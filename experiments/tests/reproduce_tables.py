"""A table of seconds, on the digits, as files."""

from pathlib import Path

import yaml

ROWS = yaml.safe_load("""
constant: {title: constant, predictor: {class_path: diffusion_mp_experiments.reproduce.predictors.Constant}}
labels:
  title: labels
  predictor: {class_path: diffusion_mp_experiments.reproduce.predictors.Labels}
  search: {predictor.alpha: {uniform: [0.5, 0.99]}}
gcn:
  title: GCN
  model: {class_path: diffusion_mp.models.DiffusionGNN, init_args: {conv: gcn}}
  search: {model.num_layers: {choice: [1, 2]}}
difformer:
  title: DIFFormer-s
  model: {class_path: diffusion_mp.models.DIFFormer, init_args: {num_layers: 2}}
  optimizer: {weight_decay: 0.001}
""")
TABLE = yaml.safe_load("""
title: Digits
rows: [constant, labels, gcn, difformer]
data:
  class_path: diffusion_mp_experiments.train.datamodules.KNNDataModule
  init_args: {name: digits, k: 5, per_class: 5, num_val: 100}
search:
  {lr: {loguniform: [0.005, 0.05]}, model.dropout: {uniform: [0.0, 0.5]}, model.hidden_channels: {choice: [8]}}
baselines: [gcn, labels]
quick: {trials: 1, splits: 1}
""")
TABLE |= {"splits": 2, "tuning": 1, "trials": 3, "epochs": 6, "patience": 4}


def write_table(configs: Path, name: str = "digits", **changes: object) -> Path:
    folder = configs / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.yaml").write_text(yaml.safe_dump({**TABLE, **changes}))
    for row, content in ROWS.items():
        (folder / f"{row}.yaml").write_text(yaml.safe_dump(content))
    return folder
