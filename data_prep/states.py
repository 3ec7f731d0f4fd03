"""The target's hidden states of the training rows, written to disk, so that training need not run the target.

    python -m data_prep.states recipe=smollm2 data.states=bf16
    accelerate launch data_prep/states.py recipe=smollm2 data.states=fp8

Each process writes its share of the shards (RANK of WORLD_SIZE, as launchers set them or you do by hand), and skips
those that are there. `train/eagle.py` with data.states set writes what is missing by itself.
"""

import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path

if not __package__:  # run as a file, from any folder; its own would hide the standard library's `inspect`
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from omegaconf import OmegaConf

from data_prep.probe import Load, training_dtype
from data_prep.progress import meter
from data_prep.run import Prepared, check, data_root, prepare
from data_prep.sources import SourceCost
from data_prep.state_store import Layout, Stored, free_bytes, refuse_full, stored, tensor_bytes, write_shard
from data_prep.teacher import read_features
from models.attention import Documents
from models.source import Source
from models.target import Target, check_taps, choose_device, choose_dtype, load_target
from recipes.cli import entry
from recipes.schema import Recipe, UserError

PACKED = 8192  # tokens of whole rows in a forward on a GPU; a CPU takes rows one by one, as training does there


def layout_of(recipe: Recipe, source: Source, prepared: Prepared, dtype: torch.dtype) -> Layout:
    """`dtype`: of the target's forward."""
    return Layout(
        prepared.folder.parent,
        prepared.train,
        source.fingerprint,
        source.hidden_size,
        check_taps(recipe.target.taps, source.n_layers),
        dtype,
        recipe.data.states,
    )


def forward_dtype(recipe: Recipe, device: torch.device, bf16: bool) -> torch.dtype:
    """Of the frozen target while it teaches; `bf16`: the training step computes in it."""
    return torch.bfloat16 if bf16 and device.type == "cpu" else choose_dtype(recipe.target.dtype, device)


def write(layout: Layout, load: Callable[[], Target], rank: int, ranks: int) -> None:
    """This process's share of the missing shards, after a look at the disk; the target is loaded if there is any."""
    missing = layout.missing()
    own = [number for number in missing if number % ranks == rank]
    if rank == 0:
        print(f"states: {describe(layout, missing)}", flush=True)
    refuse_full(layout)
    if not own:
        return
    target, done, tokens = load(), 0, 0
    lengths = layout.rows.lengths.tolist()
    with meter("states", sum(len(layout.spans[n]) for n in own)) as report:
        for number in own:
            parts: list[Stored] = []
            for rows in batches(layout.spans[number], lengths, PACKED if target.device.type == "cuda" else 1):
                parts.append(read(layout, target, rows))
                done, tokens = done + len(rows), tokens + len(parts[-1].taps_TC)
                report(done, tokens)
            write_shard(layout, number, parts)


def batches(span: Sequence[int], lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Neighbouring rows together while they have at most so many tokens; a longer row stands alone."""
    rows, size = list[int](), 0
    for row in span:
        if rows and size + lengths[row] > most:
            yield rows
            rows, size = [], 0
        rows.append(row)
        size += lengths[row]
    yield rows


@torch.no_grad()
def read(layout: Layout, target: Target, rows: list[int]) -> Stored:
    """Neighbouring rows through the target."""
    part = slice(int(layout.rows.offsets[rows[0]]), int(layout.rows.offsets[rows[-1] + 1]))
    ids_T, teaches_T = layout.rows.ids[part].long().to(target.device), layout.teaches[part]
    if len(rows) == 1:
        states = target.features(ids_T.unsqueeze(0))
    else:
        lengths = [int(layout.rows.lengths[row]) for row in rows]
        states = target.packed_features(ids_T, Documents(lengths, target.device))
    return stored(read_features(target, states, teaches_T), layout.states, len(layout.taps))


def describe(layout: Layout, missing: list[int]) -> str:
    whole, rest = layout.size(range(len(layout.spans))), layout.size(missing)
    return (
        f"{layout.states}, {len(layout.rows):,} rows, {len(layout.rows.ids):,} tokens: {whole:,} bytes "
        f"({whole / 1e9:,.2f} GB) in {len(layout.spans)} shards, {len(missing)} to be made ({rest / 1e9:,.2f} GB; "
        f"{free_bytes(layout.folder) / 1e9:,.1f} GB free) in {layout.folder}"
    )


def expected_size(recipe: Recipe, source: Source | None, load: Load) -> str:
    """What the states will take, from the rows themselves where they are prepared, else at most; '' without states."""
    if recipe.data.states == "none" or source is None:
        return "" if recipe.data.states == "none" else "states: their size is not known before the target is fetched"
    prepared = prepared_already(recipe, source)
    if prepared is not None:
        device = choose_device(recipe.device)
        bf16 = training_dtype(recipe, device) == torch.bfloat16
        layout = layout_of(recipe, source, prepared, forward_dtype(recipe, device, bf16))
        return f"states: {describe(layout, layout.missing())}"
    answers = load.answered + load.kept
    tokens = min(load.asked + answers, load.rows * recipe.data.max_length)
    taps = len(check_taps(recipe.target.taps, source.n_layers))
    size = tensor_bytes(tokens, min(tokens, answers), source.hidden_size, taps, recipe.data.states)
    free = free_bytes(data_root(recipe)) / 1e9
    return f"states: {recipe.data.states}, at most {size / 1e9:,.2f} GB in {data_root(recipe)} ({free:,.1f} GB free)"


def prepared_already(recipe: Recipe, source: Source) -> Prepared | None:
    """The prepared data, where they are at hand: nothing is fetched, and nobody is asked to write."""
    if not data_root(recipe).is_dir() or any(s.kind == "hub" for s in recipe.data.sources.values()):
        return None

    def refused(dtype: torch.dtype) -> Target:
        raise UserError("no target is loaded for this")

    try:
        with redirect_stdout(io.StringIO()):
            return prepare(recipe, refused, source, writes=False)
    except UserError:
        return None


def main(recipe: Recipe) -> None:
    if recipe.data.states == "none":
        raise UserError("data.states=none asks for no states on disk. Give data.states=bf16 or data.states=fp8")
    costs, source = check(recipe)
    if source is None or recipe.dry_run:
        print(OmegaConf.to_yaml(OmegaConf.structured(recipe)))
        print(SourceCost.table(costs))
        print(expected_size(recipe, source, SourceCost.load(costs)))
        return
    rank, ranks, device = _share(), _shares(), _device(recipe)
    bf16 = training_dtype(recipe, device) == torch.bfloat16
    dtype = forward_dtype(recipe, device, bf16)
    # several processes would each prepare the data
    prepared = prepare(recipe, lambda d: load_target(recipe.target, device, d), source, writes=ranks == 1)
    write(layout_of(recipe, source, prepared, dtype), lambda: load_target(recipe.target, device, dtype), rank, ranks)


def _share() -> int:
    return int(os.environ.get("RANK", "0"))


def _shares() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _device(recipe: Recipe) -> torch.device:
    device = choose_device(recipe.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return device


if __name__ == "__main__":
    entry(main)
