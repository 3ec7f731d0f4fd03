"""What a drafter's chains would get accepted, without a decoder: the target answers, the drafter is asked everywhere.

Teacher forcing is exact here: a chain's draft i counts only where all before it were the target's own tokens, so what
the drafter is fed at step i is what it would have drafted. T slots of a row.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from models.attention import Documents
from models.eagle3 import Eagle3
from models.generate import generate
from models.target import Target
from recipes.schema import UserError

PROMPTS = Path(__file__).resolve().parents[1] / "data_prep" / "prompts" / "report.jsonl"  # ships with Espalier


@dataclass(frozen=True)
class Simulated:
    """tau = tokens emitted by rounds / rounds, greedy, over all prompts. `by_position`: the share of rounds that
    accepted draft j and all before it; rounds cut by the end of an answer count for what they kept."""

    tau: float
    rounds: int
    prompts: int
    length: int
    max_new_tokens: int
    by_position: list[float]


def shipped_prompts(count: int) -> list[str]:
    """First turns, of all categories in turn."""
    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [str(line["turns"][0]) for line in lines[:count]]


def simulate(target: Target, drafter: Eagle3, count: int = 10, length: int = 7, max_new_tokens: int = 64) -> Simulated:
    """Greedy chains of `length` drafts on `count` prompts that ship with Espalier, template arguments left alone."""
    prompts = [render(target, text) for text in shipped_prompts(count)]
    room = target.max_positions - max_new_tokens - length - 1
    prompts = [ids for ids in prompts if len(ids) <= room]
    if not prompts:
        raise UserError(f"none of the prompts fits the target's {target.max_positions} positions")
    heat = [0.0] * len(prompts)
    answers = generate(
        target, prompts, max_new_tokens=max_new_tokens, temperatures=heat, slots=10, seed=0, stop_ids=target.eos_ids
    )
    emitted, rounds, accepted, offered = 0, 0, [0] * length, [0] * length
    for ids, answer in zip(prompts, answers, strict=True):
        hits = chain_hits(target, drafter, ids + answer, len(ids), length)
        start = 1  # the first token is the prefill's
        while start < len(answer):
            left = len(answer) - start
            got = min(hits[start - 1], left)
            for j in range(got if got == left else length):
                offered[j] += 1
                accepted[j] += j < got
            emitted += min(got + 1, left)
            start += got + 1
            rounds += 1
    tau = emitted / rounds if rounds else 1.0
    shares = [a / o if o else 0.0 for a, o in zip(accepted, offered, strict=True)]
    return Simulated(tau, rounds, len(prompts), length, max_new_tokens, shares)


def render(target: Target, text: str) -> list[int]:
    said = [{"role": "user", "content": text}]
    rendered = target.tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    return [int(i) for i in target.tokenizer(rendered, add_special_tokens=False)["input_ids"]]


@torch.no_grad()
def chain_hits(target: Target, drafter: Eagle3, ids: list[int], start: int, length: int) -> list[int]:
    """For each answer token but the last, how many drafts in a row after it are the row's own (at most `length`)."""
    row = torch.tensor(ids, device=target.device)
    T = len(ids) - 1  # slot p reads the embedding of x[p + 1]
    taps_TC = target.features(row[None, :T]).taps_BTC[0].to(drafter.fc.weight.dtype)
    padded = torch.cat((row, row.new_zeros(length)))  # what lies past the end is never counted
    states = drafter.unroll(taps_TC, target.embed(padded[1:]), length, Documents([T], target.device))
    first = start - 1  # the slot that reads the first answer token
    alive = torch.ones(T - first, dtype=torch.bool, device=target.device)
    hits = torch.zeros(T - first, dtype=torch.int64, device=target.device)
    for i, state_TH in enumerate(states):
        drafted = drafter.vocab.to_target(drafter.logits(state_TH[first:]).argmax(-1).to(drafter.vocab.d2t.device))
        inside = torch.arange(first, T, device=target.device) + 2 + i < len(ids)
        wanted = padded[first + 2 + i : first + 2 + i + T - first]
        alive = alive & inside & (drafted.to(target.device) == wanted)
        hits += alive
    return hits.tolist()
