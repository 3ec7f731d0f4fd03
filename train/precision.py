"""What a run computes in: chosen once, by the recipe, the device and a short timing, and kept to its end."""

from pathlib import Path

import torch

from data_prep.probe import training_dtype
from data_prep.states import forward_dtype
from recipes.schema import Recipe
from train.checkpoint import STEP, TEACHER, Store


def precision(recipe: Recipe, device: torch.device, folder: Path) -> dict[str, str]:
    """Names of the dtypes of the training step and of the frozen target that teaches, as the run's identity holds them:
    those that the run in the folder began with, else what is best here. A line says where the two differ."""
    step = training_dtype(recipe, device)
    teacher = forward_dtype(recipe, device, step == torch.bfloat16)
    here = {key: str(dtype).removeprefix("torch.") for key, dtype in ((STEP, step), (TEACHER, teacher))}
    began = {key: name for key, name in Store(folder).identity().items() if key in here}
    for key, name in began.items():
        if name != here[key]:
            print(f"{key}: {name}, as the run began; a new one would take {here[key]} here", flush=True)
    return here | began
