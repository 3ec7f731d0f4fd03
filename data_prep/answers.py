"""The target answers the prompts: rows of its very own tokens, turn by turn."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from data_prep.loops import is_loop
from data_prep.progress import meter
from data_prep.prompts import Prompt
from data_prep.rows import Rows, make_rows
from data_prep.supervision import encode_generated
from data_prep.template import edges, render, tokenise
from models.generate import generate
from models.target import Target, choose_dtype
from recipes.schema import DataConfig

SHORTEST = 2  # tokens of an answer: one to feed and one to predict
PROBE_SECONDS = 0.02


@dataclass
class Dialogue:
    """One prompt on its way to a row."""

    prompt: Prompt
    source: str
    temperature: float
    ids: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    text: str = ""  # what `ids` spell, up to the last generation prompt
    answers: list[list[int]] = field(default_factory=list)
    open: bool = True  # the last answer ended by itself, so a next turn can follow
    fate: str = ""  # "" | no_room | empty | cut | truncated


def answer_prompts(
    target: Target, prompts: Sequence[tuple[str, Prompt]], data: DataConfig, args: Mapping[str, Any], seed: int
) -> tuple[Rows, dict[str, Any]]:
    """Rows of (source, prompt) pairs answered by the target, and what became of them.

    A row never outgrows `max_length`: its last answer gets only the room that is left (counted as cut if it needed
    more). A prompt with no room for an answer, or with an empty answer, is left out and counted.
    """
    stop_ids = target.eos_ids | edges(target.tokenizer, "assistant", args).end_ids
    rates = data.temperatures
    dialogues = [Dialogue(p, source, rates[i % len(rates)]) for i, (source, p) in enumerate(prompts)]
    began = time.monotonic()
    tokens = unasked = 0
    for turn in range(max((len(p.turns) for _, p in prompts), default=0)):
        asked = [d for d in dialogues if d.open and turn < len(d.prompt.turns)]
        ready = [d for d in asked if _ask(d, target.tokenizer, args, data.max_length)]
        unasked += len(asked) - len(ready) if turn else 0
        if not ready:
            continue
        budgets = [min(data.answer_tokens, data.max_length - len(d.ids)) for d in ready]
        with meter(f"the target answers, turn {turn + 1}" if turn else "the target answers", len(ready)) as progress:
            answers = generate(
                target,
                [d.ids for d in ready],
                max_new_tokens=budgets,
                temperatures=[d.temperature for d in ready],
                slots=data.slots,
                seed=seed + turn,
                stop_ids=stop_ids,
                progress=progress,
            )
        tokens += sum(map(len, answers))
        for dialogue, answer, budget in zip(ready, answers, budgets, strict=True):
            _take(dialogue, answer, stop_ids, cut=budget < data.answer_tokens)
    done = [d for d in dialogues if d.fate not in ("no_room", "empty")]
    seconds = time.monotonic() - began
    fates = Counter(d.fate for d in dialogues)
    report = {
        "prompts": len(dialogues),
        "rows": len(done),
        "answer_tokens": tokens,
        "seconds": round(seconds, 1),
        "tokens_per_s": round(tokens / max(seconds, 1e-9), 1),
        **{fate: fates[fate] for fate in ("truncated", "cut", "no_room", "empty")},
        "turns_left_out": unasked,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
    }
    return make_rows([(d.ids, d.marks) for d in done], [_meta(d) for d in done]), report


def generation_dtype(setting: str, device: torch.device) -> torch.dtype:
    """`data.dtype`; auto = bfloat16 on a GPU, and on a CPU where a short timed product says that it is faster there."""
    if setting != "auto" or device.type != "cpu":
        return choose_dtype(setting, device)
    return torch.bfloat16 if _product_seconds(torch.bfloat16) < _product_seconds(torch.float32) else torch.float32


def _product_seconds(dtype: torch.dtype) -> float:
    """Best time of a product of the shape that batched decoding has, over a few hundredths of a second."""
    a, b = torch.ones(32, 768, dtype=dtype), torch.ones(768, 2048, dtype=dtype)
    _ = a @ b  # the first call sets the kernel up
    best, end = float("inf"), time.perf_counter() + PROBE_SECONDS / 2
    while (began := time.perf_counter()) < end:
        _ = a @ b
        best = min(best, time.perf_counter() - began)
    return best


def _ask(dialogue: Dialogue, tokenizer: Any, args: Mapping[str, Any], max_length: int) -> bool:
    """Put the next user turn behind what is there; False without room, or when the template rewrites the past."""
    said = [tokenizer.decode(a[:-1]) for a in dialogue.answers]
    text = render(tokenizer, dialogue.prompt.messages(said), args, generation=True)
    if not dialogue.answers:
        dialogue.ids = tokenise(tokenizer, text)
        dialogue.marks = [0] * len(dialogue.ids)
    else:
        past = dialogue.text + said[-1]
        added = tokenise(tokenizer, text.removeprefix(past))
        dialogue.open = text.startswith(past) and added[:1] == dialogue.answers[-1][-1:]
        if not dialogue.open or len(dialogue.ids) + len(added) - 1 + SHORTEST > max_length:
            return False
        dialogue.ids = dialogue.ids + added[1:]  # the answer's end token is there already
        dialogue.marks = dialogue.marks + [0] * (len(added) - 1)
    dialogue.text = text
    if len(dialogue.ids) + SHORTEST > max_length:
        dialogue.open, dialogue.fate = False, "no_room"
    return dialogue.open


def _take(dialogue: Dialogue, answer: list[int], stop_ids: frozenset[int], cut: bool) -> None:
    dialogue.answers.append(answer)
    dialogue.ids, dialogue.marks = encode_generated(dialogue.ids, answer, dialogue.marks)
    if answer and answer[-1] in stop_ids:
        if len(answer) < SHORTEST and len(dialogue.answers) == 1:
            dialogue.open, dialogue.fate = False, "empty"
    else:
        dialogue.open, dialogue.fate = False, "cut" if cut else "truncated"


def _meta(d: Dialogue) -> dict[str, Any]:
    return {
        "id": d.prompt.id,
        "source": d.source,
        "category": d.prompt.category,
        "key": d.prompt.key,
        "temperature": d.temperature,
        "fate": d.fate or "ended",
        "loop": any(is_loop(a) for a in d.answers),
    }
