"""What a round costs: milliseconds by phase of every decoder, on random weights of a known model's shape; beside it
the seconds in which the context was read, and on a GPU the most memory that was held.

    python scripts/bench_decode.py shape=qwen3-8b context=512,8192 [batch=1] [rounds=48] [decoders=ar,eagle]

Beside it stands the floor: the bytes of the weights that a step must read, over this device's measured copy bandwidth.
Random weights accept next to nothing, so a round is a round of fixed cost. `flex` and `flex-parallel` are a calibrated
FlexDraft's, blocks of 16 in the last third of the layers (or layers=N). Shapes: qwen3-8b, smollm2, tiny.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eval.decode import decode_keeping
from eval.drafters import Drafter
from eval.engine import PHASES
from eval.settings import Settings
from models.device import choose_device, choose_dtype
from models.eagle3 import Eagle3, Eagle3Config
from models.flexdraft import FlexDraft, FlexDraftConfig
from models.source import Source
from models.target import Target
from models.vocab import VocabMap

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "family": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936, "draft_vocab": 32000,
    },
    "smollm2": {
        "family": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "head_dim": 64,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "draft_vocab": 16384,
    },
    "tiny": {
        "family": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "draft_vocab": 160,
    },
}  # fmt: skip
DECODERS = {
    "ar": Settings("ar"),
    "chain": Settings("chain", depth=7),
    "eagle": Settings("eagle"),
    "graft": Settings("graft", gates=(0.0, 0.0, 0.0)),  # drafts to the end: the dearest round
    "graft-stopped": Settings("graft", gates=(1.0, 1.0, 1.0), graft_fill="always"),  # stops at once: all retrieval
    "splice-stopped": Settings("splice", gates=(1.0, 1.0, 1.0), graft_fill="always"),
}
BLOCKS = {  # of FlexDraft: every draft of a block is verified, with a group of masks behind each
    "flex": Settings("flex", depth=15, branch=1, nodes=15, gates=(0.0,)),
    "flex-parallel": Settings("flex", depth=15, branch=1, nodes=15, gates=(0.0,), parallel=True),
}


def build(shape: str, device: torch.device, longest: int) -> tuple[Target, Eagle3]:
    from transformers import AutoConfig, AutoModelForCausalLM

    options = dict(SHAPES[shape])
    family, draft_vocab, dtype = options.pop("family"), options.pop("draft_vocab"), choose_dtype("auto", device)
    config = AutoConfig.for_model(family, max_position_embeddings=longest, tie_word_embeddings=False, **options)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    target = Target(model, None, Source(shape, Path(), "", config.num_hidden_layers, frozenset(), ""))
    vocab = VocabMap.from_ids(torch.arange(draft_vocab), config.vocab_size)
    drafter = Eagle3(Eagle3Config.from_target(target, vocab), vocab)
    drafter.init_from_target(target)
    return target, drafter.to(device=device, dtype=dtype)


def block_drafter(target: Target, layers: int) -> FlexDraft:
    drafter = FlexDraft(FlexDraftConfig.from_target(target, layers, 16, calibrator_rank=256))
    drafter.init_from_target(target, [torch.arange(20)])
    return drafter.to(device=target.device, dtype=target.dtype).eval()


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.empty((1 << 30) if device.type == "cuda" else (1 << 26), dtype=torch.uint8, device=device)
    into, seconds = torch.empty_like(source), []
    for _ in range(7):
        wait(device)
        start = time.perf_counter()
        into.copy_(source)
        wait(device)
        seconds.append(time.perf_counter() - start)
    return 2 * source.numel() / statistics.median(seconds)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(argv: list[str]) -> None:
    options = {"shape": "qwen3-8b", "context": "512", "batch": "1", "rounds": "48", "device": "auto"}
    options |= {"layers": "0", "decoders": ",".join((*DECODERS, *BLOCKS))} | dict(a.split("=", 1) for a in argv)
    device, rounds, batch = choose_device(options["device"]), int(options["rounds"]), int(options["batch"])
    contexts = [int(c) for c in options["context"].split(",")]
    labels = options["decoders"].split(",")
    target, eagle = build(options["shape"], device, max(contexts) + 16 * rounds + 512)
    blocks = block_drafter(target, int(options["layers"])) if BLOCKS.keys() & set(labels) else None
    size = sum(p.numel() * p.element_size() for p in target.model.parameters())
    size -= target.embed_weight.numel() * target.embed_weight.element_size()  # a few rows of it are read
    bandwidth = copy_bandwidth(device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{options['shape']} on {name}, {target.dtype}, batch {batch}: weights {size / 1e9:.2f} GB, copy bandwidth "
          f"{bandwidth / 1e12:.2f} TB/s, floor of a step {1000 * size / bandwidth:.2f} ms")  # fmt: skip
    decode = decode_keeping()
    source = torch.Generator().manual_seed(0)
    for context in contexts:
        prompts = torch.randint(0, target.vocab_size, (batch, context), generator=source).tolist()
        print(f"context {context}: ms a round, {rounds} rounds, warmed up by as many; median of 3 runs")
        head = ("decoder", "round", *PHASES[1:], "accepted", "read in s", "peak GiB")
        print("  " + "".join(f"{word:>14}" for word in head))
        for label in labels:
            drafter: Drafter | None = blocks if label in BLOCKS else eagle
            settings = Settings(**{**vars((DECODERS | BLOCKS)[label]), "max_new_tokens": rounds})
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            runs = [decode(target, drafter, prompts, settings, row_ids=[*range(batch)]) for _ in range(4)][1:]
            cost = [statistics.median(1000 * r.seconds[p] / r.rounds_total for r in runs) for p in PHASES[1:]]
            whole = statistics.median(1000 * r.decode_seconds / r.rounds_total for r in runs)
            accepted = sum(row.accepted for row in runs[0].rows) / max(1, sum(row.rounds for row in runs[0].rows))
            read = statistics.median(r.seconds["prefill"] for r in runs)
            peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
            figures = "".join(f"{c:14.3f}" for c in cost) + f"{accepted:14.2f}{read:14.3f}{peak:14.2f}"
            print(f"  {label:>14}{whole:14.3f}{figures}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
