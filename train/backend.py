"""What runs the objective: one process, DDP, or DeepSpeed ZeRO-1, 2 and 3, with or without offload to the CPU.

What here knows DeepSpeed's insides clips its parts of the gradients, and brings state, parameters and AdamW's moments
by name, whole, in and out of whatever partition the backend keeps them in.
"""

import os
import warnings
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers.integrations import unset_hf_deepspeed_config

from recipes.schema import Recipe, TrainConfig, UserError
from train.checkpoint import MOMENTS, Moments
from train.objective import Objective

# Rank 0 prepares data, evaluates and waits for nobody; the others wait for it this long before they call it dead.
PATIENCE = timedelta(hours=12)


def make_accelerator(device: torch.device, clip: float) -> Accelerator:
    """One for the whole process.

    Mixed precision is the objective's own autocast over fp32 parameters, the same under every backend, so accelerate
    and DeepSpeed are told "no"; clipping is the recipe's, whatever the config file says.
    """
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    cpu = device.type == "cpu"
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    group = InitProcessGroupKwargs(backend="gloo" if cpu else None, timeout=PATIENCE)
    # gradients live where they are reduced: without a copy of all of them, and of that time
    views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    # a group of one process alone is not set up by accelerate
    handlers = [group, views] if launched > 1 or deepspeed else []
    accelerator = Accelerator(cpu=cpu and not deepspeed, mixed_precision="no", kwargs_handlers=handlers)
    if accelerator.num_processes != launched:
        raise UserError(
            f"{launched} processes were launched, but each sees {accelerator.num_processes}: they would train apart. "
            "Launch with one of the files of recipes/accelerate."
        )
    # of the collectives of DeepSpeed and of a sharded target, several a step
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+` is deprecated", FutureWarning)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        unset_hf_deepspeed_config()  # by which transformers would partition a target that is loaded under ZeRO-3
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        for kind in ("fp16", "bf16"):
            if config.get(kind, {}).get("enabled") is True:
                raise UserError(  # and `clip_parts` would not know by what fp16 scales the loss
                    f"{kind} is enabled in the DeepSpeed file. Take it out: parameters are fp32 here, and "
                    "train.precision asks for bf16, as an autocast over them."
                )
        config["gradient_clipping"] = clip
        if clips_parts(accelerator):
            config["gradient_clipping"], config["zero_optimization"]["compute_grad_norm"] = 0.0, False
        config["timers"] = {"throughput": {"enabled": False}}  # it waits for the GPU twice a step
        config["gradient_accumulation_steps"] = 1  # the loop divides by itself
        config["train_micro_batch_size_per_gpu"] = 1  # DeepSpeed wants a number; the loop batches
        config["zero_force_ds_cpu_optimizer"] = False  # torch's fused AdamW is as good there and compiles nothing
    accelerator.gradient_accumulation_steps = 1
    return accelerator


def zero_stage(accelerator: Accelerator) -> int:
    """DeepSpeed's; 0 under every other backend."""
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    return int(accelerator.state.deepspeed_plugin.zero_stage) if deepspeed else 0


def shards_target(recipe: Recipe, accelerator: Accelerator) -> bool:
    """Whether each process keeps a part of the frozen target: `target.shard`, by itself under ZeRO-3."""
    wanted = recipe.target.shard == "always" or (recipe.target.shard == "auto" and zero_stage(accelerator) == 3)
    return wanted and accelerator.num_processes > 1


def offloads(accelerator: Accelerator) -> bool:
    """Whether AdamW runs on the CPU."""
    if not zero_stage(accelerator):
        return False
    zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    return bool(zero.get("offload_optimizer", {}).get("device", "none") != "none")


def clips_parts(accelerator: Accelerator) -> bool:
    """Whether `clip_parts` clips and not DeepSpeed, which reads the norm on the host: that waits until a GPU has done
    all it was given, and under a small target the GPU then waits for the host."""
    return zero_stage(accelerator) in (1, 2) and not offloads(accelerator)


def clip_parts(engine: Any, clip: float) -> Tensor:
    """Under ZeRO-1 and 2, between backward and step: scale this process's part of the averaged gradients so that their
    norm over all processes is at most `clip`; returns that norm before. A gradient that is no number spoils the
    parameters, as under DDP: the guard stops the run before they are saved."""
    parts = [part for group in engine.optimizer.averaged_gradients.values() for part in group]
    square = torch.nn.utils.get_total_norm(parts).square()
    torch.distributed.all_reduce(square)
    norm = square.sqrt()
    torch._foreach_mul_(parts, (clip / (norm + 1e-6)).clamp(max=1.0))
    return norm


def make_optimizer(objective: Objective, cfg: TrainConfig, fused: bool = False) -> torch.optim.AdamW:
    """AdamW over the drafter's fp32 parameters; gains and biases are not decayed."""
    trained = [p for p in objective.drafter.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained}]
    if cfg.weight_decay > 0:
        groups = [{"params": [p for p in trained if p.dim() > 1]}]
        groups.append({"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0})
    betas = (cfg.betas[0], cfg.betas[1])
    wanted = [g for g in groups if g["params"]]
    return torch.optim.AdamW(wanted, cfg.learning_rate, betas, weight_decay=cfg.weight_decay, fused=fused or None)


def gather(drafter: nn.Module, optimizer: torch.optim.Optimizer, engine: Any) -> tuple[dict[str, Tensor], Moments, int]:
    """(model, what is frozen left out; moments; AdamW's step count). Under DeepSpeed (`engine`) a collective that all
    ranks must call."""
    trained = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
    frozen = {name for name, p in drafter.named_parameters() if not p.requires_grad}
    model = {name: _own(t) for name, t in drafter.state_dict().items() if name not in frozen}
    if engine is None:
        states = {name: optimizer.state[p] for name, p in trained.items()}
        moments = {kind: {name: _own(s[kind]) for name, s in states.items()} for kind in MOMENTS}
        count = max((int(s["step"]) for s in states.values()), default=0)
        return model, moments, count
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if engine.zero_optimization_stage() < 3:
        _link(engine.optimizer)
    moments = {kind: {} for kind in MOMENTS}
    for name, p in trained.items():
        model[name] = _own(safe_get_full_fp32_param(p))
        for kind in MOMENTS:
            moments[kind][name] = _own(safe_get_full_optimizer_state(p, kind))
    count = max(int(s["step"]) for s in engine.optimizer.optimizer.state.values())
    return model, moments, count


def fill(drafter: nn.Module, model: dict[str, Tensor]) -> None:
    """Put in what `gather` found; what is frozen stays as it was made."""
    frozen = {name: p for name, p in drafter.named_parameters() if not p.requires_grad}
    drafter.load_state_dict(frozen | model)


def restore_optimizer(
    drafter: nn.Module, optimizer: torch.optim.Optimizer, engine: Any, moments: Moments, count: int
) -> None:
    """Put AdamW's state back, after the backend has wrapped the model (parameters go in before)."""
    trained: dict[str, Any] = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
    if engine is None:
        for name, p in trained.items():
            loaded = {kind: moments[kind][name].to(p.device) for kind in MOMENTS}
            optimizer.state[p] = {"step": torch.tensor(float(count), device=p.device), **loaded}
        return
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    # ZeRO keeps flat fp32 partitions and makes AdamW's state lazily at the first step: make it now, as that first step
    # would, then fill it by name. Stage 3 finds a parameter's place in them by itself
    zero = engine.optimizer
    partitioned = engine.zero_optimization_stage() == 3
    groups = [zero.fp32_partitioned_groups_flat] if partitioned else [g["params"] for g in zero.optimizer.param_groups]
    for flat in (flat for group in groups for flat in group):
        blank = {kind: torch.zeros_like(flat) for kind in MOMENTS}
        zero.optimizer.state[flat] = {"step": torch.tensor(float(count), device=flat.device), **blank}
    if not partitioned:
        _link(zero)
    for name, p in trained.items():
        for kind in MOMENTS:
            whole = moments[kind][name].to(flat.device)
            if partitioned:
                safe_set_local_optimizer_state(p, _partition(whole, p.ds_tensor.numel()), kind)
            else:
                safe_set_full_optimizer_state(p, whole, kind)


def _link(zero: Any) -> None:
    """ZeRO-1 and 2 find a parameter's AdamW state through links. They make them once, behind the first step of the
    first group of parameters, when the others have no state yet: so they are made anew."""
    zero._hp_optimizer_states_linked = False
    zero._lazy_init_hp_params_optimizer_state()


def _partition(whole: Tensor, size: int) -> Tensor:
    """This rank's part of a tensor that ZeRO-3 cuts into equal parts, the last one padded. (DeepSpeed's own setter of
    whole tensors fails where there is padding.)"""
    start = torch.distributed.get_rank() * size
    part = whole.flatten()[start : start + size]
    return torch.nn.functional.pad(part, (0, size - len(part)))


def _own(tensor: Tensor) -> Tensor:
    """A copy of its own on the CPU; floats in fp32."""
    tensor = tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)
    return tensor.contiguous()
