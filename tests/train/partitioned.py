"""An entry point of training with every parameter partitioned under ZeRO-3, whose own settings leave small ones whole.

accelerate launch ... partitioned.py flexdraft|calibrator key=value ...
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from accelerate import Accelerator

from recipes.cli import entry
from train import backend, calibrator, flexdraft, run


def partitioned(device: torch.device, clip: float) -> Accelerator:
    made = backend.make_accelerator(device, clip)
    made.state.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return made


if __name__ == "__main__":
    vars(run)["make_accelerator"] = partitioned
    entry(run.one_screen({"flexdraft": flexdraft, "calibrator": calibrator}[sys.argv[1]].main), sys.argv[2:])
