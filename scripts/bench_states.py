"""How fast states go to disk and come back: `python scripts/bench_states.py recipe=smollm2 data.states=bf16`.

Of the recipe's store, which is written first (`python -m data_prep.states` with the same arguments): its shards are
copied through `write_shard` into a folder beside it, which goes again; then an epoch's micro-batches are read in the
order of training, with the files out of the page cache and from it. The target runs in neither.
"""

import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from data_prep.probe import training_dtype
from data_prep.run import prepare
from data_prep.state_store import Layout, StateStore, write_shard
from data_prep.states import forward_dtype, layout_of
from models.device import choose_device
from models.source import resolve
from models.target import load_target
from recipes.cli import entry
from recipes.schema import Recipe
from train.batches import Pack, plan_epoch


def main(recipe: Recipe) -> None:
    source, device = resolve(recipe.target), choose_device(recipe.device)
    prepared = prepare(recipe, lambda dtype: load_target(recipe.target, device, dtype), source, writes=False)
    bf16 = training_dtype(recipe, device) == torch.bfloat16
    layout = layout_of(recipe, source, prepared, forward_dtype(recipe, device, bf16))
    steps = plan_epoch(prepared.train.lengths.numpy(), recipe.train, recipe.seed, 0)
    packs = [pack for step in steps for pack in step]
    print(f"{os.cpu_count()} CPUs; {recipe.data.states}; {len(packs)} micro-batches")
    copied(layout)
    for number in range(len(layout.spans)):
        with layout.path(number).open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    read("read from the disk", layout, packs)
    read("read from the page cache", layout, packs)


def copied(layout: Layout) -> None:
    with tempfile.TemporaryDirectory(dir=layout.root) as folder:
        store, copy = StateStore(layout), replace(layout, root=Path(folder))
        parts = [[store.read(span)] for span in layout.spans]
        began = time.perf_counter()
        for number, part in enumerate(parts):
            write_shard(copy, number, part)
        say("written and flushed", layout, began)


def read(name: str, layout: Layout, packs: list[Pack]) -> None:
    store, began = StateStore(layout), time.perf_counter()
    for pack in packs:
        store.read(pack)
    say(name, layout, began)


def say(what: str, layout: Layout, began: float) -> None:
    seconds, size, tokens = time.perf_counter() - began, sum(layout.sizes), len(layout.rows.ids)
    print(f"{what}: {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s, {size / seconds / 1e9:.2f} GB/s", flush=True)


if __name__ == "__main__":
    entry(main)
