"""The target's hidden states of the training rows, written to disk, so that training need not run the target.

    python -m data_prep.states recipe=smollm2 data.states=bf16
    accelerate launch data_prep/states.py recipe=smollm2 data.states=fp8

Each process writes its share of the shards (RANK of WORLD_SIZE, as launchers set them or you do by hand), and skips
those that are there. `train/eagle.py` with data.states set writes what is missing by itself.
"""

import io
import os
import sys
import time
from collections.abc import Callable, Iterator
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
from models.device import choose_device, choose_dtype, local_device
from models.source import Source
from models.target import Target, check_taps, load_target
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


def write(
    layout: Layout, missing: list[int], load: Callable[[], Target], rank: int, ranks: int, together: bool = False
) -> None:
    """This process's share of the missing shards, after a look at the disk; the target is loaded if there is any.

    `together`: a forward of the target is one of all processes (a sharded one), so that all must run as many; then
    they must agree on what is missing.
    """
    if rank == 0:
        print(f"states: {describe(layout, missing)}", flush=True)
    refuse_full(layout, missing)
    own = share(missing, rank, ranks)
    if not own and not (missing and together):
        return
    target, done, tokens, forwards = load(), 0, 0, 0
    began = time.monotonic()
    most = PACKED if target.device.type == "cuda" else 1
    with meter("states", sum(len(layout.spans[n]) for n in own)) as report:
        for number in own:
            parts: list[Stored] = []
            for rows in batches(layout, number, most):
                parts.append(read(layout, target, rows))
                done, tokens, forwards = done + len(rows), tokens + len(parts[-1].taps_TC), forwards + 1
                report(done, tokens)
            write_shard(layout, number, parts)
    seconds = time.monotonic() - began
    print(f"states: {tokens:,} tokens written in {seconds:,.1f} s, {tokens / seconds:,.0f} tokens/s", flush=True)
    if together:
        most_of_all = max(sum(len([*batches(layout, n, most)]) for n in share(missing, r, ranks)) for r in range(ranks))
        for _ in range(most_of_all - forwards):
            read(layout, target, [0])


def share(missing: list[int], rank: int, ranks: int) -> list[int]:
    return [number for number in missing if number % ranks == rank]


def batches(layout: Layout, number: int, most: int) -> Iterator[list[int]]:
    """The shard's rows, neighbours together while they have at most so many tokens; a longer row stands alone."""
    rows, size, lengths = list[int](), 0, layout.rows.lengths
    for row in layout.spans[number]:
        length = int(lengths[row])
        if rows and size + length > most:
            yield rows
            rows, size = [], 0
        rows.append(row)
        size += length
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
    """What the states will take on disk: from the rows themselves where they are prepared, else at most."""
    if recipe.data.states == "none":
        return "states: none on disk, the target computes them as they are needed"
    if source is None:
        return "states: their size is not known before the target is fetched"
    prepared = prepared_already(recipe, source)
    if prepared is not None:
        device = choose_device(recipe.device)
        bf16 = training_dtype(recipe, device) == torch.bfloat16
        layout = layout_of(recipe, source, prepared, forward_dtype(recipe, device, bf16))
        missing = layout.missing()
        refuse_full(layout, missing)
        return f"states: {describe(layout, missing)}"
    answers = load.answered + load.kept
    tokens = min(load.asked + answers, load.rows * recipe.data.max_length)
    taps = len(check_taps(recipe.target.taps, source.n_layers))
    size = tensor_bytes(tokens, min(tokens, answers), source.hidden_size, taps, recipe.data.states)
    free = free_bytes(data_root(recipe))
    doubt = "" if size <= free else ", so they may not fit; refused if they don't, once the data are prepared"
    told = f"at most {size / 1e9:,.2f} GB in {data_root(recipe)} ({free / 1e9:,.1f} GB free{doubt})"
    return f"states: {recipe.data.states}, {told}"


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
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if not 0 <= rank < ranks:
        raise UserError(f"RANK={rank} and WORLD_SIZE={ranks} name no process: RANK counts from 0 to WORLD_SIZE - 1")
    device = local_device(recipe.device)
    if ranks > 1 and recipe.train.precision == "fast" and device.type == "cpu":
        raise UserError(
            "train.precision=fast is timed by each process for itself, and they may write states of different dtypes. "
            "Give train.precision=bf16 or fp32, here and in training"
        )
    bf16 = training_dtype(recipe, device) == torch.bfloat16
    dtype = forward_dtype(recipe, device, bf16)
    # several processes would each prepare the data
    prepared = prepare(recipe, lambda d: load_target(recipe.target, device, d), source, writes=ranks == 1)
    layout = layout_of(recipe, source, prepared, dtype)
    write(layout, layout.missing(), lambda: load_target(recipe.target, device, dtype), rank, ranks)


if __name__ == "__main__":
    entry(main)
