"""Block drafters in the engine, with one that knows the answers: what is kept, what is filled, and losslessness."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.decode import Decoded, decode
from eval.drafting import UNGATED
from eval.engine import Engines
from eval.matrix import WIDTH
from eval.proposing import Blocked, proposer
from eval.settings import Settings
from eval.tree import DRAFTER, RETRIEVAL
from models.cache import KVCache
from models.target import States, Target
from recipes.schema import UserError
from tests.eval.trees import path_set
from tests.tiny import tiny_drafter

NEW, LENGTH = 30, 6


class Oracle:
    """Drafts what the target will say, every fifth token wrong and said to be likely, its neighbour right and unlikely.

    It keeps each row's text as the engine tells it, all but the first token of the prompt.
    """

    def __init__(self, answers: list[list[int]], cache: KVCache, texts: list[list[int]], rows: slice) -> None:
        self.answers, self.cache, self.texts, self.rows = answers, cache, texts, rows

    ready = False

    def verify(self, ids_BT: Tensor, cache: KVCache) -> States:
        raise NotImplementedError

    def part(self, rows: slice) -> "Oracle":
        for row in range(rows.start, rows.stop):
            self.texts[row] = []
        return Oracle(self.answers, self.cache.part(rows), self.texts, rows)

    def extend(self, taps_BTC: Tensor, next_ids_BT: Tensor, counts_B: Tensor, counts: list[int] | None) -> None:
        assert taps_BTC.shape[:2] == next_ids_BT.shape
        told = range(len(self.texts))[self.rows]
        for row, ids, count in zip(told, next_ids_BT.tolist(), counts_B.tolist(), strict=True):
            self.texts[row] += ids[:count]
        self.cache.keep(counts_B, counts)

    def block(self, length: int) -> tuple[Tensor, Tensor]:
        tokens, logp = torch.zeros(len(self.texts), length, dtype=torch.int64), torch.zeros(len(self.texts), length)
        for row, text in enumerate(self.texts):
            whole = next((a for a in self.answers if a[: len(text)] == text), [])
            for j, place in enumerate(range(len(text), len(text) + length)):
                right = whole[place] if place < len(whole) else 7
                tokens[row, j] = (right + 1) % 320 if place % 5 == 0 else right
                logp[row, j] = math.log(0.3 if place % 5 == 1 else 0.95)
        return tokens, logp


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("decoder", ["chain", "prune", "graft"])
def test_block_drafts_are_verified_losslessly(
    tiny_target: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, decoder: str, heat: float, fixed: bool
) -> None:
    """Ragged prompts, the last one into a place that another one left; all as plain decoding says."""
    target: Target = tiny_target("llama", initializer_range=0.1)
    monkeypatch.setattr(target, "eos_ids", frozenset[int]())
    source = torch.Generator().manual_seed(4)
    prompts = [torch.randint(2, 320, (n,), generator=source).tolist() for n in (6, 9, 4)]
    plain = [row.tokens for row in decode(target, None, prompts, Settings("ar", NEW, heat)).rows]
    answers = [prompt[1:] + tokens for prompt, tokens in zip(prompts, plain, strict=True)]

    def made(_: Any, target: Target, text: KVCache, more: int) -> Oracle:
        own = KVCache(1, text.rows, 1, text.capacity + more, 8, target.device, target.dtype)
        return Oracle(answers, own, [[]] * text.rows, slice(None))

    monkeypatch.setattr("eval.engine.drafting_of", made)
    settings = Settings(decoder, NEW, heat, depth=LENGTH, branch=1, nodes=LENGTH, gates=(0.5,))
    found: Decoded = decode(target, tiny_drafter(target), prompts, settings, slots=2, engines=Engines(fixed=fixed))
    assert [row.tokens for row in found.rows] == plain
    assert all(row.sources["drafter"] > 3 for row in found.rows)
    assert all((row.stages["d0"] > 0) == (decoder != "chain") for row in found.rows)
    nodes, places = sum(row.nodes for row in found.rows), LENGTH * sum(row.rounds for row in found.rows)
    assert nodes == places if decoder == "chain" else nodes < places or decoder == "graft"


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("gate", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("decoder", ["chain", "prune", "graft"])
def test_the_confident_beginning_is_kept_and_the_matrix_fills_the_rest(decoder: str, gate: float, fixed: bool) -> None:
    source = torch.Generator().manual_seed(1)
    roots = torch.tensor([3, 8, 5, 11])
    tokens, chances = (
        torch.randint(0, 12, (4, LENGTH), generator=source),
        torch.rand(4, LENGTH, generator=source) ** 0.5,
    )
    settings = Settings(decoder, depth=LENGTH, nodes=LENGTH, gates=(gate,))
    oracle = Oracle([], KVCache(1, 4, 1, 8, 8, torch.device("cpu"), torch.float32), [[]] * 4, slice(None))
    made = proposer(settings, roots, fixed, oracle, 12)
    assert isinstance(made, Blocked)
    if made.matrix is not None:
        made.matrix.update(
            torch.arange(9), torch.rand(9, 12, generator=source).topk(WIDTH).indices
        )  # the others are cold
    tree, stage = made.fill(tokens, chances.log())
    for row in range(4):
        line: list[int] = []
        product, drafts = 1.0, 0
        for token, chance in zip(tokens[row].tolist(), chances[row].tolist(), strict=True):
            product *= chance
            if decoder != "chain" and product < gate:
                break
            line.append(token)
            drafts += 1
        assert int(stage[row]) == (UNGATED if drafts == LENGTH else 0)
        while made.matrix is not None and len(line) < LENGTH:
            guess = int(made.matrix.rows[line[-1] if line else roots[row], 0])
            if guess < 0:
                break
            line.append(guess)
        assert path_set(tree, row) == {tuple(line[: n + 1]) for n in range(len(line))}
        sources = tree.source[row, 1 : 1 + len(line)].tolist()
        assert sources == [DRAFTER] * drafts + [RETRIEVAL] * (len(line) - drafts)
    assert tree.size == 1 + LENGTH if fixed else tree.size <= 1 + LENGTH


@pytest.mark.parametrize(
    "settings", [Settings("eagle"), Settings("talon"), Settings("splice"), Settings("chain", draft_temperature=1.0)]
)
def test_a_drafter_of_lines_has_no_tree_and_draws_nothing(settings: Settings) -> None:
    oracle = Oracle([], KVCache(1, 1, 1, 8, 8, torch.device("cpu"), torch.float32), [[]], slice(None))
    with pytest.raises(UserError, match="Use chain, flex, prune, graft"):
        proposer(settings, torch.tensor([3]), False, oracle, 12)
