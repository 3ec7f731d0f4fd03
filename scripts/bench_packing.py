"""What packing is worth: row tokens/s of training micro-batches (features, forward, backward) over random rows.

    python scripts/bench_packing.py recipe=smollm2 rows=44 [key=value ...]

Three ways: rows padded to the longest of their micro-batch, sorted by length beforehand; rows packed; packed with the
target's features kept from an earlier pass. Rows have 40 to 300 tokens, or up to `data.max_length` where that is more
than 512. Best of two passes.
"""

import random
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data_prep.rows import Rows, make_rows
from models.device import choose_device
from models.eagle3 import Eagle3, Eagle3Config
from models.target import Target, load_target
from models.vocab import VocabMap
from recipes.cli import entry
from recipes.schema import Recipe
from train.batches import Batch, Pack, load_batch, plan_epoch
from train.cost import use_bf16
from train.objective import UnrollLoss


def random_rows(recipe: Recipe, vocab_size: int) -> Rows:
    draw, longest = random.Random(recipe.seed), recipe.data.max_length if recipe.data.max_length > 512 else 300
    lengths = [draw.randint(40, longest) for _ in range(recipe.rows)]
    rows = [([draw.randrange(vocab_size) for _ in range(n)], [0] * 30 + [1] * (n - 30)) for n in lengths]
    return make_rows(rows, [{}] * len(rows))


def padded(rows: Rows, part: Pack) -> Batch:
    """Every row as a document of the longest one's length."""
    loaded = [rows.row(i) for i in part]
    longest = max(len(ids) for ids, _ in loaded)
    ids, answer = (torch.cat([torch.nn.functional.pad(r[k], (0, longest - len(r[k]))) for r in loaded]) for k in (0, 1))
    return Batch(ids, answer, [longest] * len(loaded), [])


def cut_by_length(lengths: np.ndarray, limit: int) -> list[Pack]:
    """Micro-batches of rows of like length, at most `limit` positions when padded."""
    parts: list[Pack] = [[]]
    for row in np.argsort(lengths, kind="stable").tolist():
        if parts[-1] and (len(parts[-1]) + 1) * lengths[row] > limit:
            parts.append([])
        parts[-1].append(row)
    return parts


def objective(recipe: Recipe, target: Target, keep_bytes: int = 0) -> UnrollLoss:
    size = min(recipe.eagle.draft_vocab or target.vocab_size, target.vocab_size)
    vocab = VocabMap.from_ids(torch.arange(size), target.vocab_size)
    drafter = Eagle3(Eagle3Config.from_target(target, vocab), vocab).to(target.device)
    drafter.init_from_target(target)
    bf16 = target.dtype == torch.bfloat16
    return UnrollLoss(drafter, target, vocab, recipe.eagle, bf16, keep_bytes)


def seconds(loss: UnrollLoss, batches: list[Batch]) -> float:
    start = time.perf_counter()
    for batch in batches:
        loss.zero_grad()
        inputs = loss.prepare(batch)
        loss(inputs, loss.counts(inputs))[0].backward()
    if loss.target.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main(recipe: Recipe) -> None:
    device = choose_device(recipe.device)
    target = load_target(recipe.target, device, torch.bfloat16 if use_bf16(recipe, device) else torch.float32)
    rows = random_rows(recipe, target.vocab_size)
    lengths, tokens = rows.lengths.numpy(), len(rows.ids)
    packs = [one for step in plan_epoch(lengths, recipe.train, recipe.seed, 0) for one in step]
    sorted_parts = cut_by_length(lengths, recipe.train.micro_batch_tokens)
    ways = {
        "padded": ([padded(rows, part) for part in sorted_parts], 0),
        "packed": ([load_batch(rows, part) for part in packs], 0),
        "packed, kept": ([load_batch(rows, part) for part in packs], 2**40),
    }
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    print(f"{len(rows)} rows, {tokens:,} tokens, {target.name} in {target.dtype} on {device}{threads}")
    for name, (batches, keep_bytes) in ways.items():
        loss = objective(recipe, target, keep_bytes)
        seconds(loss, batches if keep_bytes else batches[:2])
        best, ran = min(seconds(loss, batches) for _ in range(2)), sum(len(b.ids_T) for b in batches)
        speed = f"{best / len(batches) * 1000:,.0f} ms a micro-batch, {tokens / best:,.0f} row tokens/s"
        print(f"{name:13} {len(batches)} micro-batches, padding {1 - tokens / ran:.1%}: {speed}", flush=True)


if __name__ == "__main__":
    entry(main)
