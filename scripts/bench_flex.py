"""What a FlexDraft training step costs beside its bare matrix products, on random weights of a known model's shape.

    python scripts/bench_flex.py [shape=qwen3-8b] [rows=4] [length=2048] [flex.key=value ...] [rounds=10] [warm=3]
        [device=auto]

`masks` is a step from what the target says to the changed weights: forward, loss, backward, clipping, AdamW. `step` is
that and the target's own forward. Beside each stand the products it can't do without: of the masks in the tuned layers
(projections forward and twice backward, frozen blocks forward and once backward), of the frozen head for them and for
the positions that teach them, and for `step` of the target. Attention's products are not among them. All arms run in
one process, in turn; medians. Shapes: qwen3-8b, smollm2, tiny. All tokens are one answer's.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from omegaconf import OmegaConf
from torch import Tensor

from data_prep.rows import make_rows
from models.device import choose_device
from models.flexdraft import FlexDraft, FlexDraftConfig
from models.target import Target
from recipes.cli import told, words
from recipes.schema import FlexConfig, Recipe
from scripts.bench_decode import SHAPES, build, wait
from train.backend import make_optimizer
from train.batches import Batch, load_batch
from train.flex_objective import FlexLoss, Learning
from train.fused_loss import CHUNK_GPU

Step = Callable[[], object]


def batch_of(target: Target, rows: int, length: int) -> Batch:
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(0, target.vocab_size, (rows, length), generator=source).tolist()
    return load_batch(make_rows([(row, [1] * length) for row in ids], [{}] * rows), [*range(rows)])


def learner(target: Target, cfg: FlexConfig) -> FlexLoss:
    ranks = cfg.calibrator_rank * cfg.calibrator, cfg.lora_rank * (cfg.parametrisation == "lora")
    whole = cfg.parametrisation == "layers"
    drafter = FlexDraft(FlexDraftConfig.from_target(target, cfg.layers, cfg.block_size, *ranks, whole=whole))
    drafter = drafter.to(target.device)
    drafter.init_from_target(target, [torch.arange(20)])
    return FlexLoss(drafter, target, Learning(cfg, bf16=target.dtype == torch.bfloat16))


def products(target: Target, loss: FlexLoss, batch: Batch) -> tuple[Step, Step]:
    """Of the masks, and of the target."""
    c, x = loss.config, loss.prepare(batch)
    slots, taught = len(x.step_n), len(x.final_mH)
    masks, tokens = len(x.groups.positions_R), len(batch.ids_T)
    hidden, inner = c.hidden_size, int(target.config.intermediate_size)
    wide, narrow = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    own = [(hidden, wide), (hidden, narrow), (hidden, narrow), (wide, hidden)]
    block = [(hidden, 2 * inner), (inner, hidden)]
    learns = {"full": (own, block), "lora": ([], own + block), "layers": (own + block, [])}
    learned, frozen = learns[loss.learning.cfg.parametrisation]

    def made(*size: int) -> Tensor:
        return torch.randn(size, device=target.device, dtype=target.dtype)

    weights = {pair: made(*pair) for pair in {*own, *block, (hidden, wide + 2 * narrow)}}
    widths = {width for pair in weights for width in pair}
    inputs, clean = ({width: made(count, width) for width in widths} for count in (masks, tokens))
    slot, teacher, head = made(slots, hidden), made(taught, hidden), target.head_weight
    chunk = CHUNK_GPU // c.vocab_size

    def of_masks() -> None:
        for _ in range(c.target_layers - c.split_layer):
            for a, b in (*learned, *frozen):
                inputs[a] @ weights[a, b]
                inputs[b] @ weights[a, b].T
            for a, b in learned:
                inputs[a].T @ inputs[b]
        for part in slot.split(chunk):
            (part @ head.T) @ head
        for part in teacher.split(chunk):
            part @ head.T

    def of_target() -> None:
        for _ in range(c.target_layers):
            for a, b in ((hidden, wide + 2 * narrow), (wide, hidden), *block):
                clean[a] @ weights[a, b]

    return of_masks, of_target


def arms_of(target: Target, loss: FlexLoss, batch: Batch, optimizer: torch.optim.Optimizer) -> dict[str, Step]:
    """Each arm's step."""
    x, clip = loss.prepare(batch), Recipe().train.clip

    def masks() -> None:
        loss(x, loss.counts(x))[0].backward()
        torch.nn.utils.clip_grad_norm_(loss.drafter.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    def step() -> None:
        nonlocal x
        x = loss.prepare(batch)
        masks()

    of_masks, of_target = products(target, loss, batch)
    return {"masks": masks, "products of masks": of_masks, "step": step, "products of target": of_target}


def measure(arms: dict[str, Step], rounds: int, warm: int, device: torch.device) -> dict[str, float]:
    """Median milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(warm + rounds):
        for name, step in arms.items():
            wait(device)
            begin = time.perf_counter()
            step()
            wait(device)
            if turn >= warm:
                times[name].append(1000 * (time.perf_counter() - begin))
    return {name: statistics.median(of_arm) for name, of_arm in times.items()}


def main(argv: list[str]) -> dict[str, float]:
    gpu = torch.cuda.is_available()
    options = {"shape": "qwen3-8b" if gpu else "tiny", "rows": "4", "length": "2048" if gpu else "64"}
    options |= {"rounds": "10", "warm": "3", "device": "auto"}
    own = [word for word in argv if not word.startswith("flex.")]
    flex = OmegaConf.from_dotlist([word.removeprefix("flex.") for word in argv if word not in own])
    options = words(own, options, str(__doc__), {"shape": [*SHAPES]}, "rows length rounds")
    cfg = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(FlexConfig), flex))
    assert isinstance(cfg, FlexConfig)
    device, rows, length = choose_device(options["device"]), int(options["rows"]), int(options["length"])
    target, _ = build(options["shape"], device, length + cfg.block_size)
    loss = learner(target, cfg)
    optimizer = make_optimizer(loss, Recipe().train, fused=device.type == "cuda")
    batch = batch_of(target, rows, length)
    found = measure(arms_of(target, loss, batch, optimizer), int(options["rounds"]), int(options["warm"]), device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    c, groups = loss.config, rows * min(cfg.anchors, length - 2)
    trained = sum(p.numel() for p in loss.drafter.parameters() if p.requires_grad)
    state = sum(t.nbytes for of in optimizer.state.values() for t in of.values() if isinstance(t, Tensor))
    print(
        f"{options['shape']} on {name}, {target.dtype}, torch {torch.__version__}; {rows} x {length} tokens, {groups} "
        f"groups of {c.block_size} in {c.target_layers - c.split_layer} layers, {cfg.parametrisation}\n"
        f"{trained:,} trained parameters, AdamW's state {state / 1e9:.3f} GB"
    )
    if device.type == "cuda":
        print(f"peak {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB, the products' own tensors among it")
    for arm, ms in found.items():
        print(f"{arm:>20}{ms:12.2f} ms")
    bare = found["products of masks"], found["products of masks"] + found["products of target"]
    print(f"bare products over masks: {bare[0] / found['masks']:.3f}; over the step: {bare[1] / found['step']:.3f}")
    return found


if __name__ == "__main__":
    told(lambda: main(sys.argv[1:]))
