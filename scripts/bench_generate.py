"""Useful tokens a second of our generator against transformers' `model.generate`, one model, the same prompts, sampled.

    python scripts/bench_generate.py [recipe=smollm2 | target=FOLDER] [prompts=FILE.jsonl] [count=4096] [new=512]
        [slots=1024] [batches=128,512,1024,1536] [seconds=40] [temperature=1.0] [device=auto]

Ours answers all prompts, prefill included. `generate` takes far longer, so it gets a part: of the prompts sorted by
length each batch size answers those in the middle, which spares it padding and the long ones, and is stopped after so
many seconds, which spares it the steps with the longest contexts and the fewest rows. Useful tokens are those up to
the end token.
Beside it stands our share of the byte floor: weights once a step, and keys and values of every token that a new one
looks at, over this device's measured copy bandwidth. Without `prompts`, short questions and long texts are made up.
"""

import random
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data_prep.prompts import load_prompts
from data_prep.template import edges, prompt_ids
from models.device import choose_device, choose_dtype
from models.generate import generate
from models.target import Target, load_target
from recipes.loading import load
from recipes.schema import TargetConfig
from scripts.bench_decode import copy_bandwidth, wait

LONGEST_PROMPT = 1024  # tokens; a longer one is left out


def mixed(count: int) -> list[str]:
    """Questions that ship with Espalier, half of them behind one to twelve texts of others."""
    source, texts = random.Random(0), [" ".join(p.turns) for p in load_prompts("report")]
    out = []
    for i in range(count):
        before = source.choices(texts, k=source.randint(1, 12)) if i % 2 else []
        out.append("\n\n".join([*before, source.choice(texts)]))
    return out


def timed(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    wait(device)
    start = time.perf_counter()
    result = work()
    wait(device)
    return result, time.perf_counter() - start


def floor_bytes(target: Target, prompts: list[list[int]], outputs: list[list[int]], slots: int) -> float:
    """Bytes that decoding must read: the weights once a step, and for each new token all tokens before it."""
    weights = sum(p.numel() * p.element_size() for p in target.model.parameters())
    if target.embed_weight.data_ptr() != target.head_weight.data_ptr():
        weights -= target.embed_weight.numel() * target.embed_weight.element_size()  # a few rows of it are read
    # the first token of each output came with the prompt
    steps = max(max(len(o) - 1 for o in outputs), sum(len(o) - 1 for o in outputs) / slots)
    token = 2 * target.n_layers * target.n_kv * target.head_dim * target.dtype.itemsize
    seen = sum((len(o) - 1) * len(p) + (len(o) - 1) * len(o) // 2 for p, o in zip(prompts, outputs, strict=True))
    return steps * weights + seen * token


def by_transformers(
    target: Target, batch: list[list[int]], new: int, heat: float, stops: list[int], seconds: float
) -> int:
    """Useful tokens of one batch, as far as it comes."""
    width = max(map(len, batch))
    ids = torch.tensor([[stops[0]] * (width - len(p)) + p for p in batch], device=target.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch], device=target.device)
    sampling = {"do_sample": True, "temperature": heat, "top_k": 0, "top_p": 1.0} if heat else {"do_sample": False}
    out = target.model.generate(
        ids, attention_mask=mask, max_new_tokens=new, eos_token_id=stops, pad_token_id=stops[0],
        max_time=seconds, **sampling,
    )[:, width:]  # fmt: skip
    ended = torch.isin(out, torch.tensor(stops, device=out.device))
    first = torch.where(ended.any(1), ended.int().argmax(1) + 1, out.shape[1])
    return int(first.sum())


def line(who: str, prompts: int, useful: int, seconds: float, more: str = "") -> float:
    """A line of the table; tokens a second."""
    speed = useful / seconds
    print(f"{who:<22} {prompts:>8,} {useful:>14,} {seconds:>9.1f} {speed:>10,.0f} {more}".rstrip(), flush=True)
    return speed


def ours(target: Target, prompts: list[list[int]], options: dict[str, str], stop_ids: frozenset[int]) -> float:
    """Useful tokens a second."""
    slots, new, heat = int(options["slots"]), int(options["new"]), float(options["temperature"])

    def work(part: list[list[int]], limit: int) -> list[list[int]]:
        heats = [heat] * len(part)
        return generate(target, part, max_new_tokens=limit, temperatures=heats, slots=slots, seed=0, stop_ids=stop_ids)

    work(prompts[:slots], 4)  # compiles the kernels and sets the libraries up
    outputs, seconds = timed(lambda: work(prompts, new), target.device)
    bandwidth = copy_bandwidth(target.device)
    floor = floor_bytes(target, prompts, outputs, slots) / bandwidth
    useful, ended = sum(map(len, outputs)), sum(o[-1] in stop_ids for o in outputs)
    speed = line(f"ours, {slots} slots", len(prompts), useful, seconds, f"{floor / seconds:>10.0%}")
    print(f"  mean answer {useful / len(outputs):.0f} tokens, {ended / len(outputs):.0%} ended by themselves")
    print(f"  byte floor {floor:.2f} s at a copy bandwidth of {bandwidth / 1e12:.3f} TB/s", flush=True)
    return speed


def theirs(target: Target, prompts: list[list[int]], options: dict[str, str], stop_ids: frozenset[int]) -> float:
    """Useful tokens a second of `generate` at the best of the batch sizes."""
    new, heat, seconds = int(options["new"]), float(options["temperature"]), float(options["seconds"])
    stops, ordered = sorted(stop_ids), sorted(prompts, key=len)
    by_transformers(target, prompts[:2], 2, heat, stops, seconds)
    rates = []
    for size in sorted({min(int(b), len(prompts)) for b in options["batches"].split(",")}):
        first = (len(ordered) - size) // 2
        batch = ordered[first : first + size]
        try:
            useful, spent = timed(partial(by_transformers, target, batch, new, heat, stops, seconds), target.device)
            rates.append(line(f"generate, batch {size}", size, useful, spent))
        except torch.cuda.OutOfMemoryError:
            print(f"generate, batch {size}: out of memory")
        torch.cuda.empty_cache()
    return max(rates)


def main(argv: list[str]) -> None:
    options = {"recipe": "smollm2", "target": "", "prompts": "", "count": "4096", "new": "512", "slots": "1024"}
    options |= {"batches": "128,512,1024,1536", "seconds": "40", "temperature": "1.0", "device": "auto"}
    given = dict(a.split("=", 1) for a in argv)
    if set(given) - set(options):
        sys.exit(f"unknown: {', '.join(set(given) - set(options))}. Known: {', '.join(options)}")
    options |= given
    count, device = int(options["count"]), choose_device(options["device"])
    config = TargetConfig(options["target"]) if options["target"] else load([f"recipe={options['recipe']}"]).target
    target = load_target(config, device, choose_dtype("auto", device))
    texts = [" ".join(p.turns) for p in load_prompts(options["prompts"])] if options["prompts"] else mixed(2 * count)
    encoded = (prompt_ids(target.tokenizer, [{"role": "user", "content": t}], {}) for t in texts)
    prompts = [*islice((p for p in encoded if len(p) <= LONGEST_PROMPT), count)]
    stop_ids = target.eos_ids | edges(target.tokenizer, "assistant", {}).end_ids
    lengths = sorted(map(len, prompts))
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    quarters = ", ".join(str(lengths[min(len(lengths) - 1, len(lengths) * k // 4)]) for k in range(5))
    print(f"{target.name} on {name}, {target.dtype}, temperature {options['temperature']}")
    print(f"{len(prompts)} prompts of {quarters} tokens (quarters), at most {options['new']} new ones")
    print(f"{'':<22} {'prompts':>8} {'useful tokens':>14} {'seconds':>9} {'tokens/s':>10} {'of the floor':>10}")
    speed = ours(target, prompts, options, stop_ids)
    print(f"ours is {speed / theirs(target, prompts, options, stop_ids):.2f} times as fast as the best of generate")


if __name__ == "__main__":
    main(sys.argv[1:])
