"""Useful tokens a second of our generator against transformers' `model.generate`, one model, the same prompts, sampled.

    python scripts/bench_generate.py [recipe=smollm2 | target=FOLDER] [prompts=FILE.jsonl] [count=4096] [new=512]
        [slots=2048] [batches=256,512,1024,2048] [sample=1024] [temperature=1.0] [device=auto] [runs=2]

`generate` gets its prompts sorted by length, so that it pads little; each batch size of `batches` runs `sample` prompts
of all lengths (or one batch, if that is more), and the best one runs all. Useful tokens are those up to the end token.
Beside it stands our share of the byte floor: weights once a step, and keys and values of every token that a new one
looks at, over this device's measured copy bandwidth. Without `prompts`, short questions and long texts are made up.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data_prep.prompts import load_prompts
from data_prep.template import edges, prompt_ids
from models.generate import generate
from models.target import Target, choose_device, choose_dtype, load_target
from recipes.schema import TargetConfig, load

LONGEST_PROMPT = 1024  # tokens; a longer one is left out


def mixed(count: int) -> list[str]:
    """Questions that ship with Espalier, half of them behind one to twelve texts of others."""
    source, texts = random.Random(0), [" ".join(p.turns) for p in load_prompts("report")]
    out = []
    for i in range(count):
        before = source.choices(texts, k=source.randint(1, 12)) if i % 2 else []
        out.append("\n\n".join([*before, source.choice(texts)]))
    return out


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    wait(device)
    start = time.perf_counter()
    result = work()
    wait(device)
    return result, time.perf_counter() - start


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.empty((1 << 30) if device.type == "cuda" else (1 << 26), dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    seconds = [timed(lambda: into.copy_(source), device)[1] for _ in range(7)]
    return 2 * source.numel() / statistics.median(seconds)


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
    target: Target, prompts: list[list[int]], batch: int, new: int, heat: float, stops: list[int]
) -> int:
    """Useful tokens of all prompts, in batches taken in order of length."""
    useful, ordered = 0, sorted(prompts, key=len)
    for start in range(0, len(ordered), batch):
        part = ordered[start : start + batch]
        width = max(map(len, part))
        ids = torch.tensor([[stops[0]] * (width - len(p)) + p for p in part], device=target.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in part], device=target.device)
        sampling = {"do_sample": True, "temperature": heat, "top_k": 0, "top_p": 1.0} if heat else {"do_sample": False}
        out = target.model.generate(
            ids, attention_mask=mask, max_new_tokens=new, eos_token_id=stops, pad_token_id=stops[0], **sampling
        )[:, width:]
        ended = torch.isin(out, torch.tensor(stops, device=out.device))
        first = torch.where(ended.any(1), ended.int().argmax(1) + 1, out.shape[1])
        useful += int(first.sum())
    return useful


def ours(target: Target, prompts: list[list[int]], options: dict[str, str], stop_ids: frozenset[int]) -> float:
    """Useful tokens a second of the last run."""
    slots, bandwidth, speed = int(options["slots"]), copy_bandwidth(target.device), 0.0
    print(f"copy bandwidth {bandwidth / 1e12:.3f} TB/s")

    def work() -> list[list[int]]:
        heat = [float(options["temperature"])] * len(prompts)
        settings = {"max_new_tokens": int(options["new"]), "temperatures": heat, "stop_ids": stop_ids}
        return generate(target, prompts, slots=slots, seed=0, **settings)

    for run in range(int(options["runs"])):
        outputs, seconds = timed(work, target.device)
        useful, ended = sum(map(len, outputs)), sum(o[-1] in stop_ids for o in outputs)
        speed, floor = useful / seconds, floor_bytes(target, prompts, outputs, slots) / bandwidth
        print(f"ours, {slots} slots, run {run + 1}: {useful:,} useful tokens in {seconds:.1f} s: {speed:,.0f}/s")
        print(f"  mean answer {useful / len(outputs):.0f} tokens, {ended / len(outputs):.0%} ended by themselves")
        print(f"  byte floor {floor:.2f} s, {floor / seconds:.0%} of it reached", flush=True)
    return speed


def theirs(target: Target, prompts: list[list[int]], options: dict[str, str], stop_ids: frozenset[int]) -> float:
    """Useful tokens a second of `generate` at the best of the batch sizes, on all prompts."""

    def run(batch: int, part: list[list[int]]) -> float:
        new, heat = int(options["new"]), float(options["temperature"])
        useful, seconds = timed(
            lambda: by_transformers(target, part, batch, new, heat, sorted(stop_ids)), target.device
        )
        speed: float = useful / seconds
        print(
            f"generate, batch {batch}, {len(part)} prompts: {useful:,} useful tokens in {seconds:.1f} s: {speed:,.0f}/s"
        )
        return speed

    rates: dict[int, float] = {}
    for batch in map(int, options["batches"].split(",")):
        size = min(len(prompts), max(batch, int(options["sample"])))
        try:
            rates[batch] = run(batch, sorted(prompts, key=len)[:: len(prompts) // size][:size])
        except torch.cuda.OutOfMemoryError:
            print(f"generate, batch {batch}: out of memory")
            torch.cuda.empty_cache()
    return run(max(rates, key=lambda b: rates[b]), prompts)


def main(argv: list[str]) -> None:
    options = {"recipe": "smollm2", "target": "", "prompts": "", "count": "4096", "new": "512", "slots": "2048"}
    options |= {"batches": "256,512,1024,2048", "sample": "1024", "temperature": "1.0", "device": "auto", "runs": "2"}
    options |= dict(a.split("=", 1) for a in argv)
    count, device = int(options["count"]), choose_device(options["device"])
    config = TargetConfig(options["target"]) if options["target"] else load([f"recipe={options['recipe']}"]).target
    target = load_target(config, device, choose_dtype("auto", device))
    texts = [" ".join(p.turns) for p in load_prompts(options["prompts"])] if options["prompts"] else mixed(count)
    encoded = [prompt_ids(target.tokenizer, [{"role": "user", "content": t}], {}) for t in texts]
    prompts = [p for p in encoded if len(p) <= LONGEST_PROMPT][:count]
    stop_ids = target.eos_ids | edges(target.tokenizer, "assistant", {}).end_ids
    lengths = sorted(map(len, prompts))
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    quarters = ", ".join(str(lengths[min(len(lengths) - 1, len(lengths) * k // 4)]) for k in range(5))
    print(f"{target.name} on {name}, {target.dtype}, temperature {options['temperature']}")
    print(f"{len(prompts)} prompts of {quarters} tokens (quarters), at most {options['new']} new ones")
    speed = ours(target, prompts, options, stop_ids)
    print(f"ours is {speed / theirs(target, prompts, options, stop_ids):.2f} times as fast as the best of generate")


if __name__ == "__main__":
    main(sys.argv[1:])
