"""Rows of prepared data with their supervised tokens coloured. `python -m data_prep.inspect recipe=NAME rows=3`"""

from itertools import pairwise
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from data_prep.run import Prepared, prepare
from data_prep.run import main as check
from data_prep.supervision import supervised
from models.source import load_tokenizer, resolve
from models.target import Target
from recipes.cli import entry
from recipes.schema import Recipe, UserError

STYLES = {0: "dim", 1: "yellow", 2: "bold green"}
LEGEND = (
    "dim: prompt; yellow: first token of an answer (the target itself emits it); green: what the drafter must predict"
)


def roles(answer_T: Tensor) -> Tensor:
    """int [T]: 0 = prompt, 1 = answer token that no slot predicts, 2 = predicted by a slot supervised at step 0."""
    out = (answer_T != 0).int()
    slots = supervised(answer_T, 1)[0].nonzero().flatten()
    out[slots + 2] = 2
    return out


def coloured(tokenizer: Any, ids_T: Tensor, answer_T: Tensor) -> Text:
    """The row as text, decoded run by run, so that characters of several tokens stay whole."""
    text = Text()
    role, starts = roles(answer_T), torch.ones(len(ids_T), dtype=torch.bool)
    starts[1:] = role[1:] != role[:-1]
    edges = [*starts.nonzero().flatten().tolist(), len(ids_T)]
    for start, end in pairwise(edges):
        text.append(tokenizer.decode(ids_T[start:end].tolist()), style=STYLES[int(role[start])])
    return text


def show(prepared: Prepared, tokenizer: Any, count: int, console: Console) -> None:
    rows = prepared.train
    console.print(LEGEND)
    for i in range(min(count, len(rows))):
        ids, answer = rows.row(i)
        meta, predicted = rows.meta[i], int(supervised(answer, 1).sum())
        where = f"row {i}: {meta['source']} / {meta['id']}, T = {meta['temperature']}, {meta['fate']}"
        console.rule(f"{where}, {len(ids)} tokens, {predicted} predicted", align="left")
        console.print(coloured(tokenizer, ids, answer), soft_wrap=True)


def main(recipe: Recipe) -> None:
    def not_there(dtype: torch.dtype) -> Target:
        raise UserError(f"no prepared data for this recipe yet. Run: python -m data_prep.run recipe={recipe.recipe}")

    if recipe.dry_run:
        check(recipe)
        return
    if recipe.rows < 1:
        raise UserError(f"rows={recipe.rows} must be at least 1")
    source = resolve(recipe.target)
    prepared = prepare(recipe, not_there, source)
    show(prepared, load_tokenizer(source, recipe.target.trust_remote_code), recipe.rows, Console())


if __name__ == "__main__":
    entry(main)
