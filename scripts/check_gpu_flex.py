"""Checks of FlexDraft that need a GPU: captured decoding in both modes, and the training step, against a CPU's.

    python scripts/check_gpu_flex.py [device=cuda]

Prints one line a check and exits 1 when one fails.
"""

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data_prep.rows import make_rows
from eval.decode import decode
from eval.engine import Engines
from eval.settings import Settings
from models.flexdraft import FlexDraft, FlexDraftConfig
from models.target import Target, load_target
from recipes.schema import FlexConfig, TargetConfig, UserError
from tests.tiny import tiny_model_folder
from train.batches import load_batch
from train.flex_objective import CalibratorLoss, FlexLoss, Learning, MaskLoss

SIZE, NEW = 6, 20
PROMPTS = [[3, 9, 27, 81, 243], [5] * 11, [7, 8, 9], list(range(20, 90))]
LEARNERS = ("full", "hard labels", "adapters", "whole layers", "with calibrator", "calibrator alone")


def drafter_of(target: Target, calibrator: int = 0, lora: int = 0, whole: bool = False) -> FlexDraft:
    """The same weights on every device, a little off the target's."""
    torch.manual_seed(0)
    drafter = FlexDraft(FlexDraftConfig.from_target(target, 3, SIZE, calibrator, lora, whole))
    drafter.init_from_target(target, [torch.arange(20)])
    for parameter in drafter.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.05 * torch.randn(parameter.shape))
    return drafter.to(target.device).eval()


def decoders_say_what_plain_decoding_says(target: Target) -> Iterator[tuple[str, bool]]:
    drafter, engines = drafter_of(target, 4), Engines(fixed=True)
    kinds = [("flex", False), ("flex", True), ("graft", True), ("chain", False)]
    for heat in (0.0, 0.8):
        plain = decode(target, None, PROMPTS, Settings("ar", NEW, heat), engines=engines, slots=3)
        for name, parallel in kinds:
            settings = Settings(
                name, NEW, heat, depth=SIZE - 1, branch=1, nodes=SIZE - 1, gates=(0.001,), parallel=parallel
            )
            rows = decode(target, drafter, PROMPTS, settings, engines=engines, slots=3).rows
            held = [row.tokens for row in rows] == [row.tokens for row in plain.rows]
            yield f"{name}{', parallel' if parallel else ''} at T = {heat:g}", held


def learner(target: Target, kind: str) -> MaskLoss:
    calibrator, lora = 4 * ("calibrator" in kind), 2 * (kind == "adapters")
    drafter = drafter_of(target, calibrator, lora, kind == "whole layers")
    cfg = FlexConfig(block_size=SIZE, anchors=3, loss="hard" if kind == "hard labels" else "soft")
    alone = kind == "calibrator alone"
    return CalibratorLoss(drafter, target, Learning(cfg)) if alone else FlexLoss(drafter, target, Learning(cfg))


def stepped(target: Target, kind: str) -> list[torch.Tensor]:
    """Loss, metric sums and gradients of one micro-batch of two rows, on the CPU."""
    source, loss = torch.Generator().manual_seed(1), learner(target, kind)
    texts = [torch.randint(2, 300, (n,), generator=source).tolist() for n in (60, 23)]
    rows = make_rows([(ids, [0] * 3 + [1] * (len(ids) - 3)) for ids in texts], [{}, {}])
    x = loss.prepare(load_batch(rows, [0, 1]))
    value, sums = loss(x, loss.counts(x))
    value.backward()
    gradients = [p.grad for p in loss.drafter.parameters() if p.grad is not None]
    return [t.detach().float().cpu() for t in (value, sums, *gradients)]


def training_is_alike(here: Target, cpu: Target) -> Iterator[tuple[str, bool]]:
    for kind in LEARNERS:
        pairs = [*zip(stepped(here, kind), stepped(cpu, kind), strict=True)]
        yield f"training, {kind}", all(torch.allclose(x, y, atol=1e-4, rtol=1e-3) for x, y in pairs)


def main(argv: list[str], families: tuple[str, ...] = ("llama", "qwen3", "gemma2", "mistral")) -> int:
    given: dict[str, Any] = dict(word.split("=", 1) for word in argv if "=" in word)
    if set(given) - {"device"} or len(given) != len(argv):
        raise UserError(f"give device=cuda or device=cpu, not {' '.join(argv)}")
    device, failed = given.get("device", "cuda"), 0
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("no GPU here")
    for family in families:
        cfg = TargetConfig(path=str(tiny_model_folder(Path(tempfile.mkdtemp()), family, head_dim=16)))
        here, cpu = load_target(cfg, device, torch.float32), load_target(replace(cfg), "cpu", torch.float32)
        for what, held in (*decoders_say_what_plain_decoding_says(here), *training_is_alike(here, cpu)):
            print(f"{family}, {what}: {'equal' if held else 'DIFFERENT'}", flush=True)
            failed += not held
    return failed


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]) > 0)
    except UserError as error:
        sys.exit(f"error: {error}")
