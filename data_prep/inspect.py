"""Rows of prepared data as a person reads them: who speaks, what is supervised, and what each unroll step predicts.

`python -m data_prep.inspect recipe=NAME rows=3 [unroll=true] [out=FILE.html]`
"""

import io
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from data_prep.run import Prepared, check, prepare
from data_prep.supervision import supervised
from data_prep.template import SENTINEL, Message, render, special_texts
from models.source import load_tokenizer
from models.target import Target
from recipes.cli import entry
from recipes.files import check_writable, make_folder, user_path, write_text
from recipes.schema import Recipe, UserError

STYLES = {0: "dim", 1: "yellow", 2: "bold green"}
LEGEND = (
    "dim: prompt; yellow: first token of an answer (the target itself emits it); green: what the drafter must predict"
)
OTHER = "EspalierOtherText"  # as SENTINEL
EDGE = 3  # slots shown at the beginning of an answer, besides those at its end in which steps drop out


def kinds(answer_T: Tensor) -> Tensor:
    """int [T]: 0 = prompt, 1 = answer token that no slot predicts, 2 = predicted by a slot supervised at step 0."""
    out = (answer_T != 0).int()
    slots = supervised(answer_T, 1)[0].nonzero().flatten()
    out[slots + 2] = 2
    return out


def runs(values_T: Tensor) -> list[tuple[int, int]]:
    """[start, end) of the stretches of equal values."""
    if not len(values_T):
        return []
    changes = (values_T.diff().nonzero().flatten() + 1).tolist()
    return [*pairwise([0, *changes, len(values_T)])]


def coloured(tokenizer: Any, ids_T: Tensor, answer_T: Tensor) -> Text:
    """The row as text, decoded run by run, so that characters of several tokens stay whole."""
    text, kind_T = Text(), kinds(answer_T)
    for start, end in runs(kind_T):
        text.append(tokenizer.decode(ids_T[start:end].tolist()), style=STYLES[int(kind_T[start])])
    return text


def headers(tokenizer: Any, args: Mapping[str, Any]) -> dict[str, str]:
    """What the template writes in front of a turn of each role that it tells apart; what it refuses is left out."""
    asked: Message = {"role": "user", "content": "q"}
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    answered: Message = {"role": "assistant", "content": OTHER}
    talks: dict[str, list[Message]] = {
        "user": [asked, answered, {"role": "user", "content": SENTINEL}],
        "tool": [asked, {**answered, "tool_calls": [call]}, {"role": "tool", "content": SENTINEL}],
        "system": [{"role": "system", "content": SENTINEL}, asked],
    }
    markers = special_texts(tokenizer)
    found: dict[str, str] = {}
    for role, messages in talks.items():
        try:
            before = render(tokenizer, messages, args).partition(SENTINEL)[0]
        except UserError:
            continue
        if role == "system":
            start = tokenizer.bos_token or ""  # unless it is what opens every turn
            header = before.strip() if found.get("user", "").startswith(start) else before.removeprefix(start).strip()
        else:  # behind the marker that ends the answer
            between = before.rpartition(OTHER)[2]
            end = min(((between.find(m), -len(m)) for m in markers if m in between), default=(0, 0))
            header = between[end[0] - end[1] :].strip()
        if header and header not in found.values():
            found[role] = header
    return found


def turns(text: str, known: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(role, what stands there) of a stretch of prompt, cut before each header; '' where no header is known."""
    places = sorted((text.find(h, at), role) for role, h in known.items() for at in _starts(text, h))
    edges = [(0, ""), *places]
    for (start, role), (end, _) in pairwise([*edges, (len(text), "")]):
        if text[start:end].strip():
            yield role, text[start:end]


def _starts(text: str, header: str) -> Iterator[int]:
    at = text.find(header)
    while at >= 0:
        yield at
        at = text.find(header, at + len(header))


def unrolled(tokenizer: Any, ids_T: Tensor, answer_T: Tensor, span: tuple[int, int], steps: int) -> Table:
    """Slots of one answer: what each has seen and is fed, and the token that each unroll step predicts (- = none)."""
    start, end = span
    slots_IT = supervised(answer_T, steps)
    table = Table("slot", "has seen", "is fed", *(f"step {i}" for i in range(steps)), box=None, header_style="bold")

    def word(place: int) -> Text:
        return Text(repr(tokenizer.decode([int(ids_T[place])]))[1:-1])

    shown = [p for p in range(max(0, start - 2), end) if p < start + EDGE - 1 or p >= end - steps - 2]
    for before, p in pairwise([shown[0], *shown]):
        if p > before + 1:
            table.add_row("...")
        said = [word(p + 2 + i) if slots_IT[i, p] else Text("-", "dim") for i in range(steps)]
        table.add_row(str(p), word(p), word(p + 1) if p + 1 < len(ids_T) else Text("-", "dim"), *said)
    return table


def show(prepared: Prepared, tokenizer: Any, recipe: Recipe, console: Console) -> None:
    rows, known = prepared.train, headers(tokenizer, recipe.target.template_args)
    console.print(LEGEND)
    for i in range(min(recipe.rows, len(rows))):
        ids_T, answer_T = rows.row(i)
        meta, predicted = rows.meta[i], int(supervised(answer_T, 1).sum())
        heat = "kept" if meta["temperature"] is None else f"T = {meta['temperature']}"
        where = f"row {i}: {meta['source']} / {meta['id']}, {heat}, {meta['fate']}"
        console.rule(Text(f"{where}, {len(ids_T)} tokens, {predicted} predicted"), align="left")
        for start, end in runs(answer_T):
            part = slice(start, end)
            if answer_T[start] == 0:
                for role, text in turns(tokenizer.decode(ids_T[part].tolist()), known):
                    console.print(Text(f"[{role or 'template'}]", "cyan"))
                    console.print(Text(text.strip("\n"), STYLES[0]), soft_wrap=True)
                continue
            count = int((kinds(answer_T)[part] == 2).sum())
            label = f"[answer {int(answer_T[start])}: tokens {start} to {end - 1}, {count} predicted]"
            console.print(Text(label, "cyan"))
            console.print(coloured(tokenizer, ids_T[part], answer_T[part]), soft_wrap=True)
            if recipe.unroll:
                console.print(unrolled(tokenizer, ids_T, answer_T, (start, end), recipe.eagle.unroll_steps))


def main(recipe: Recipe) -> None:
    def not_there(dtype: torch.dtype) -> Target:
        raise AssertionError("nothing is written here")

    if recipe.out and not recipe.out.endswith(".html"):
        raise UserError(f"out={recipe.out}: the inspector writes one HTML file. Name it so, e.g. out=rows.html")
    if recipe.out:
        check_writable(user_path(recipe.out).parent)
    _, source = check(recipe)
    if source is None or recipe.dry_run:  # None in a dry run alone
        print(OmegaConf.to_yaml(OmegaConf.structured(recipe)))
        return
    prepared = prepare(recipe, not_there, source, writes=False)
    tokenizer = load_tokenizer(source, recipe.target.trust_remote_code)
    if not recipe.out:
        show(prepared, tokenizer, recipe, Console())
        return
    page = Console(record=True, file=io.StringIO(), width=160)
    show(prepared, tokenizer, recipe, page)
    path = user_path(recipe.out)
    make_folder(path.parent)
    write_text(path, page.export_html())
    print(f"{path}: {min(recipe.rows, len(prepared.train))} rows")


if __name__ == "__main__":
    entry(main)
