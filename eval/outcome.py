"""What one decoder did on one prompt, and how prompts become token ids. No decoder is run here."""

import copy
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from data_prep.loops import is_loop
from data_prep.prompts import SHIPPED, Prompt, read_file
from data_prep.template import prompt_ids
from eval.decode import Decoded, RowResult
from eval.drafters import Drafter
from eval.matrix import SuccessorMatrix
from models.flexdraft import FlexDraft
from models.source import Source
from models.target import Target
from recipes.schema import EvalConfig, Recipe, UserError

STAGES = ("draft", "retrieve", "verify", "accept", "cache")  # where a round's time goes
SHORT_CONTEXT = 64  # tokens
REPEATED_NGRAM = 4
SPARE_POSITIONS = 16  # a tree reaches this far past the last token, at most


@dataclass
class Outcome:
    """One decoder on one prompt, summed over its turns; seconds and batch rounds are its share of its batch."""

    id: str
    category: str
    batch: int
    tokens: int = 0
    rounds: int = 0
    emitted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    batch_rounds: float = 0.0
    stage_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    offered: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    merged: int = 0  # retrieved nodes that the draft already had
    stops: Counter[str] = field(default_factory=Counter)
    context_rounds: Counter[int] = field(default_factory=Counter)  # by the bucket of the context that they began at
    context_accepted: Counter[int] = field(default_factory=Counter)
    prompts: list[list[int]] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    loop: bool = False
    verdict: str = ""  # identical | near_tie | diverged, against `ar`; greedy only

    def add(self, ids: list[int], row: RowResult, decoded: Decoded) -> None:
        """Count one turn: `row` of the batch `decoded`, answered after the prompt `ids`."""
        total = sum(r.rounds for r in decoded.rows)
        share = row.rounds / total if total else 1.0 / len(decoded.rows)
        self.tokens += len(row.tokens)
        self.rounds += row.rounds
        self.emitted += row.emitted
        self.accepted += row.accepted
        self.seconds += decoded.decode_seconds * share
        self.prefill_seconds += decoded.seconds.get("prefill", 0.0) / len(decoded.rows)
        self.batch_rounds += decoded.rounds_total * share
        for stage in STAGES:
            self.stage_seconds[stage] += decoded.seconds.get(stage, 0.0) * share
        self.offered.update(dict(enumerate(row.positions_offered)))
        self.accepted_at.update(dict(enumerate(row.positions_accepted)))
        self.sources.update(row.sources)
        self.merged += row.merged
        self.stops.update(row.stages)
        context = len(ids)
        for kept in row.accepted_per_round:
            self.context_rounds[context_bucket(context)] += 1
            self.context_accepted[context_bucket(context)] += kept
            context += kept + 1
        self.prompts.append(ids)
        self.outputs.append(row.tokens)


def context_bucket(tokens: int) -> int:
    """The power of two at or below a context's length; short ones are of one kind."""
    return max(SHORT_CONTEXT, 1 << (tokens.bit_length() - 1))


def repetition(outputs: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(repeated, all) 4-grams of the outputs: those that stood in the same output before (Welleck et al. 2020)."""
    repeated = total = 0
    for tokens in outputs:
        grams = [tuple(tokens[k : k + REPEATED_NGRAM]) for k in range(len(tokens) - REPEATED_NGRAM + 1)]
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated, total


def flag_loops(outcomes: dict[str, list[Outcome]]) -> None:
    """A prompt is flagged when any decoder's answer to it loops: one set of prompts for every row of the table."""
    looping = {o.id for rows in outcomes.values() for o in rows if any(is_loop(tokens) for tokens in o.outputs)}
    for rows in outcomes.values():
        for outcome in rows:
            outcome.loop = outcome.id in looping


def encode(target: Target, recipe: Recipe, prompt: Prompt, answers: Sequence[str] = ()) -> list[int]:
    """Token ids of the conversation up to the turn after `answers`, ready for the target to answer."""
    return prompt_ids(target.tokenizer, prompt.messages(answers), prompt.arguments(recipe.target.template_args))


def too_long(target: Source | Target, tokenizer: Any, recipe: Recipe, prompts: Sequence[Prompt]) -> Iterator[bool]:
    """Of each prompt, whether its first turn alone is more than what is taken; needs no weights."""
    limit, args = longest_prompt(target, recipe.eval), recipe.target.template_args
    return (len(prompt_ids(tokenizer, p.messages(), p.arguments(args))) > limit for p in prompts)


def check_prompts(target: Source | Target, tokenizer: Any, recipe: Recipe, prompts: Sequence[Prompt]) -> None:
    """Refuse limits that leave no prompt to measure; needs no weights."""
    check_room(target, recipe.eval)
    if all(too_long(target, tokenizer, recipe, prompts)):
        limit = longest_prompt(target, recipe.eval)
        raise UserError(
            f"every prompt is longer than {limit} tokens. Raise eval.max_prompt, or lower eval.max_new_tokens"
        )


def longest_prompt(target: Source | Target, e: EvalConfig) -> int:
    """The longest prompt that leaves room for an answer and for the tree that hangs off its last token."""
    return min(e.max_prompt, target.max_positions - e.max_new_tokens - SPARE_POSITIONS)


def check_room(target: Source | Target, e: EvalConfig) -> None:
    if longest_prompt(target, e) < 1:
        most = target.max_positions - SPARE_POSITIONS - 1
        raise UserError(
            f"eval.max_new_tokens={e.max_new_tokens} leaves no room for a prompt: the target has "
            f"{target.max_positions} positions. Use eval.max_new_tokens={most // 2} or less (at most {most} for a "
            "prompt of one token)"
        )


def warmup_prompts() -> list[Prompt]:
    """Prompts that ship with Espalier to warm the matrix and serve the tuner; they are never measured."""
    return read_file(SHIPPED / "warmup.jsonl")


def disjoint(spare: Sequence[Prompt], measured: Sequence[Prompt]) -> list[Prompt]:
    """The spare prompts of whose questions none is measured."""
    seen = {turn.strip() for prompt in measured for turn in prompt.turns}
    return [prompt for prompt in spare if not any(turn.strip() in seen for turn in prompt.turns)]


def new_matrix(target: Target) -> SuccessorMatrix:
    return SuccessorMatrix(target.vocab_size, target.device)


def in_dtype(drafter: Drafter, dtype: torch.dtype) -> Drafter:
    """The drafter in the target's dtype, as an engine would run it: a copy where it is trained in another, or in
    another form."""
    if isinstance(drafter, FlexDraft):
        drafter = drafter.merged()
    return drafter if next(drafter.parameters()).dtype == dtype else copy.deepcopy(drafter).to(dtype)


def row_id(name: str, turn: int) -> int:
    """Names the noise of one answer at T > 0: by prompt and turn alone, whatever the order or the batch."""
    digest = hashlib.sha256(f"{name}:{turn}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
