"""FlexDraft's projections as low-rank adapters on the target's (arXiv 2106.09685), made, stored and named by PEFT.

They act on mask rows alone: the projections that they sit on are the drafter's copies of the target's, frozen. Decoding
takes them merged, copy + B A alpha / r, so that it costs what full copies cost.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from models.weights import ADAPTER, apart
from recipes.files import read_json, write_json
from recipes.schema import UserError

CONFIG = "adapter_config.json"  # PEFT's name
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
PREFIX = "base_model.model.model.layers"  # PEFT's of a causal language model's decoder layers
ALPHA = 2  # times the rank
# what changes which weights there are, or how they act
NOT_DONE = (
    "rank_pattern", "alpha_pattern", "modules_to_save", "layers_pattern", "exclude_modules", "layer_replication",
    "target_parameters", "trainable_token_indices", "use_qalora",
)  # fmt: skip
PLAIN: dict[str, Any] = {"use_dora": False, "use_rslora": False, "lora_bias": False, "fan_in_fan_out": False}


def inject(layers: nn.ModuleList, rank: int) -> None:
    """Adapters on the projections of DraftAttentions, in place; the projections themselves are frozen."""
    from peft import LoraConfig, inject_adapter_in_model

    gains = [name for name, _ in layers.named_parameters() if name.endswith("norm")]
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=ALPHA * rank, target_modules=list(MODULES)), layers)
    for name, parameter in layers.named_parameters():  # PEFT freezes all but its own
        if name in gains:
            parameter.requires_grad_(True)


@torch.no_grad()
def merged(layers: nn.ModuleList) -> dict[str, Tensor]:
    """The state of layers without adapters that say the same."""
    from peft.tuners.lora import LoraLayer

    found = {name: t for name, t in layers.state_dict().items() if "lora_" not in name}
    for name, module in layers.named_modules():
        if isinstance(module, LoraLayer):
            own = f"{name}.base_layer.weight"
            found[own] = found[own] + module.get_delta_weight("default").to(found[own].dtype)
    return {name.replace(".base_layer.", "."): t for name, t in found.items()}


def adapter_names(layers: nn.ModuleList, first: int) -> dict[str, str]:
    """Parameter of the adapters -> PEFT's name of it for the whole target, whose layer `first` is layer 0 here."""
    found = {}
    for name in layers.state_dict():
        if "lora_" in name:
            number, _, rest = name.partition(".")
            found[name] = f"{PREFIX}.{int(number) + first}.self_attn.{rest.replace('.default.', '.')}"
    return found


def save_adapter(
    layers: nn.ModuleList, first: int, rank: int, base_model: str, folder: Path, dtype: torch.dtype
) -> None:
    """adapter_model.safetensors and adapter_config.json, which PEFT loads onto the target."""
    from peft import LoraConfig, get_peft_model_state_dict

    plain = {name.replace(".default.", "."): theirs for name, theirs in adapter_names(layers, first).items()}
    stored = get_peft_model_state_dict(layers, adapter_name="default")
    named = {plain[name]: t.detach().to("cpu", dtype).contiguous() for name, t in stored.items()}
    save_file(named, folder / ADAPTER, metadata={"format": "pt"})
    tuned = list(range(first, first + len(layers)))
    config = LoraConfig(
        r=rank,
        lora_alpha=ALPHA * rank,
        target_modules=list(MODULES),
        layers_to_transform=tuned,
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=base_model,
    )
    words = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    write_json(folder / CONFIG, words)


def check_adapter(folder: Path, rank: int, tuned: range) -> None:
    """Refuse an adapter_config.json that asks for modules that are not there, for other layers than the `tuned` ones,
    or for what is not done here."""
    path = folder / CONFIG
    if missing := [name for name in (CONFIG, ADAPTER) if not (folder / name).is_file()]:
        raise UserError(f"drafter={folder}: {' and '.join(missing)} is missing. Export it again.")
    config = read_json(path, f"drafter={folder}")
    modules = config.get("target_modules")
    named = {str(name) for name in modules} if isinstance(modules, list) else {str(modules)}
    if odd := apart(named, MODULES):
        raise UserError(f"drafter={folder}: {CONFIG}'s target_modules must be {', '.join(MODULES)}: it {odd}")
    layers = config.get("layers_to_transform")
    if not isinstance(layers, list) or set(map(str, layers)) != set(map(str, tuned)):
        raise UserError(
            f"drafter={folder}: {CONFIG}'s layers_to_transform is {layers}, but the tuned layers of config.json's "
            f"flexdraft_config are {tuned.start} to {tuned.stop - 1}: it is the adapter of another drafter"
        )
    wanted = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA * rank, "bias": "none", **PLAIN}
    other = [f"{key}={config.get(key)!r}, not {value!r}" for key, value in wanted.items() if config.get(key) != value]
    other += [f"{key} is given" for key in NOT_DONE if config.get(key)]
    if other:
        raise UserError(f"drafter={folder}: {CONFIG} is for another adapter: {'; '.join(other)}")
