"""A target of characters and a decoder with a price list, so that the harness can be tested without a model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import nn

from data_prep.prompts import Prompt
from eval.decode import Decoded, RowResult
from eval.settings import Settings
from models.eagle3 import Eagle3
from recipes.schema import EvalConfig, Recipe


class Letters:
    """A tokenizer whose tokens are characters."""

    chat_template = "{% for m in messages %}{{ m.role[0] + ':' + m.content + '\n' }}{% endfor %}"
    special_tokens_map: ClassVar[dict[str, str]] = {}

    def get_chat_template(self, **_: Any) -> str:
        return self.chat_template

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 128 for letter in text]}

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(token) for token in tokens)


@dataclass
class FakeTarget:
    tokenizer: Any = field(default_factory=Letters)
    vocab_size: int = 128
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    max_positions: int = 4096
    eos_ids: frozenset[int] = frozenset()
    fingerprint: str = "f00d"
    model: Any = None


@dataclass
class Call:
    prompts: list[list[int]]
    settings: Settings
    matrix: Any
    slots: int


@dataclass
class FakeDecode:
    """Answers follow from the prompt alone; a round accepts `accepts(settings)` drafts, at `cost(settings)` ms."""

    accepts: Callable[[Settings], float] = lambda settings: 0.0 if settings.decoder == "ar" else 1.0
    cost: Callable[[Settings], float] = lambda settings: 10.0
    answer: Callable[[list[int], int], list[int]] = lambda ids, n: [65 + (len(ids) + k * k) % 50 for k in range(n)]
    drafting: Callable[[Settings], float] | None = None  # ms of a round; without it a quarter drafts and half verifies
    calls: list[Call] = field(default_factory=list)

    def __call__(
        self,
        target: Any,
        drafter: Any,
        prompts: list[list[int]],
        settings: Settings,
        matrix: Any = None,
        row_ids: Any = None,
        slots: int = 0,
        ends: frozenset[int] | None = None,
    ) -> Decoded:
        assert row_ids is not None and len(row_ids) == len(prompts)
        assert (drafter is not None) == settings.drafts
        self.calls.append(Call(prompts, settings, matrix, slots))
        rows = [self._row(ids, settings) for ids in prompts]
        rounds = max(row.rounds for row in rows)
        seconds = rounds * self.cost(settings) / 1000
        parts = {"prefill": 1.0, "draft": 0.25, "retrieve": 0.0, "verify": 0.5, "accept": 0.125, "cache": 0.0}
        if self.drafting is not None:
            draft = self.drafting(settings) * rounds / 1000 / seconds
            parts |= {"draft": draft, "verify": 1 - draft, "accept": 0.0}
        return Decoded(rows, {k: v * seconds for k, v in parts.items()}, seconds, rounds)

    def _row(self, ids: list[int], settings: Settings) -> RowResult:
        tokens = self.answer(ids, settings.max_new_tokens)
        left, owed, accepted = len(tokens) - 1, (len(ids) * 0.37) % 1, list[int]()
        while left > 0:
            owed += self.accepts(settings)
            take = min(int(owed), left)
            owed -= int(owed)
            accepted.append(take)
            left -= take + (1 if left > take else 0)
        depth = 0 if settings.decoder == "ar" else settings.depth
        return RowResult(
            tokens=tokens,
            rounds=len(accepted),
            emitted=len(tokens) - 1,
            accepted=sum(accepted),
            accepted_per_round=accepted,
            drafted_depth_per_round=[depth] * len(accepted),
            positions_offered=[len(accepted)] * depth,
            positions_accepted=[sum(a > k for a in accepted) for k in range(depth)],
            sources={"drafter": sum(accepted)},
            stages={"none": len(accepted)},
            nodes=settings.most * len(accepted),
        )


def fake_drafter() -> Eagle3:
    return cast(Eagle3, nn.Linear(1, 1))


def fake_recipe(**changes: Any) -> Recipe:
    """An EvalConfig for fakes: short answers, no generate (a fake target has no model)."""
    e: dict[str, Any] = {"max_new_tokens": 12, "lossless": -1, "matrix": "warm-2"} | changes
    return Recipe(recipe="fake", eval=EvalConfig(**e))


def fake_prompts(n: int, turns: int = 1, category: str = "chat") -> list[Prompt]:
    return [Prompt(f"p{i}", [f"question {i} of turn {t}" + "?" * i for t in range(turns)], category) for i in range(n)]
