"""Freed places stay empty while retrieval wins nothing, are tried again, and no token of the output depends on it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from eval import filling, harness, proposing
from eval.decode import Decoded, decode
from eval.engine import Clock, Engines
from eval.filling import LONGEST, SHORTEST, WINDOW, WORTH, Filling
from eval.matrix import WIDTH, SuccessorMatrix, Template
from eval.proposing import Grafted, Proposal, proposer
from eval.settings import Settings
from eval.tree import FIELDS, RETRIEVAL
from models.capture import Steps
from models.eagle3 import Eagle3
from models.target import Target
from tests.eval.fakes import FakeDecode, FakeTarget, fake_drafter, fake_prompts, fake_recipe
from tests.eval.test_drafting import Scene

CPU = torch.device("cpu")
NEW = 100
# every round is stopped at once
GRAFT = Settings("graft", NEW, depth=2, branch=4, nodes=20, gates=(1.0, 1.0, 1.0))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    source = torch.Generator().manual_seed(1)
    return [torch.randint(2, 320, (n,), generator=source).tolist() for n in (5, 9)]


def booked(account: Filling, rounds: int, said: int, retrieved: int) -> Filling:
    for _ in range(rounds):
        account = account.after(said, retrieved)
    return account


def test_a_trial_that_wins_little_is_followed_by_a_rest_twice_as_long_as_the_last() -> None:
    account = Filling()
    for rest in (SHORTEST, 64, 128, 256, LONGEST, LONGEST):
        assert booked(account, WINDOW - 1, 2, 0).pays
        account = booked(account, WINDOW, 2, 0)
        assert not account.pays and not booked(account, rest - 1, 2, 0).pays
        account = booked(account, rest, 2, 2)  # of tokens said before, that is no news
        assert account.pays
    account = booked(account, WINDOW, 2, 1)
    assert account.pays
    account = booked(account, WINDOW, 2, 0)
    assert account.pays, "half of the trial before counts"
    account = booked(account, WINDOW, 2, 0)
    assert account.rest == SHORTEST, "a trial that wins enough makes up for the rests before"
    assert booked(Filling(), 50 * WINDOW, 100, int(100 * WORTH)).pays


def test_an_account_goes_where_its_matrix_goes() -> None:
    one, other = SuccessorMatrix(8), SuccessorMatrix(8)
    one.filling = Filling(rest=3)
    other.assign(one)
    assert other.filling == one.copy().filling == Filling(rest=3)
    other.assign(None)
    assert other.filling == Filling()


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("decoder", ["graft", "splice"])
def test_an_empty_proposal_is_prunes_own(tiny_target: Callable[..., Any], decoder: str, fixed: bool) -> None:
    """And has merged nothing, whatever the fill before it merged."""
    scene = Scene(tiny_target("llama"), 3, [i for i in range(320) if i % 3])

    def made(settings: Settings) -> proposing.Proposer:
        return proposer(settings, scene.roots, fixed, scene.drafting([0, 1, 2]), 320)

    def proposed(by: proposing.Proposer) -> Proposal:
        return by.propose(Steps(CPU, captures=False), Clock(CPU))

    settings = Settings(decoder, branch=4, gates=(0.0, 1.0, 0.0))
    pruned, graft, always = (
        made(replace(settings, decoder="prune")),
        made(settings),
        made(replace(settings, graft_fill="always")),
    )
    expected = proposed(pruned)
    root, first = int(scene.roots[0]), int(expected.tree.tokens[0, 1])
    for each in (graft, always):
        assert isinstance(each, Grafted)
        for row in range(3):
            each.start(row, [4, 4, int(scene.roots[row])])
        each.matrix.update(torch.tensor([root]), torch.tensor([[first, *range(100, 107)]]))
    for _ in range(2):
        filled = proposed(graft)
        assert int(filled.merged[0]) == 1 and bool((filled.tree.source == RETRIEVAL).any())
        assert isinstance(graft, Grafted) and isinstance(always, Grafted)
        graft.matrix.filling = always.matrix.filling = Filling(rest=2)
        assert int(proposed(always).merged[0]) == 1
        found = proposed(graft)
        assert found.place == expected.place != filled.place
        assert torch.equal(found.stage, expected.stage) and found.merged.tolist() == [0, 0, 0]
        for name in FIELDS:
            assert torch.equal(getattr(found.tree, name), getattr(expected.tree, name))
        graft.matrix.filling = Filling()


def watched(
    target: Target, drafter: Eagle3, prompts: list[list[int]], settings: Settings, fixed: bool
) -> tuple[Decoded, list[bool]]:
    """What was decoded, and of each round whether places were filled."""
    filled, propose = list[bool](), Grafted.propose

    def watch(self: Grafted, *given: Any) -> Proposal:
        found = propose(self, *given)
        filled.append(bool((found.tree.valid & (found.tree.source == RETRIEVAL)).any()))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Grafted, "propose", watch)
        matrix = SuccessorMatrix(target.vocab_size)
        return decode(target, drafter, prompts, settings, matrix, engines=Engines(fixed=fixed)), filled


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("decoder", ["graft", "splice"])
def test_where_retrieval_never_hits_it_rests_and_tries_again(
    target: Target,
    drafter: Eagle3,
    prompts: list[list[int]],
    decoder: str,
    heat: float,
    fixed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filling, "WINDOW", SHORTEST)  # the target's answers are short
    settings = replace(GRAFT, decoder=decoder, temperature=heat)
    plain = [row.tokens for row in decode(target, None, prompts, Settings("ar", NEW, heat)).rows]
    absent = torch.tensor([i for i in range(320) if all(i not in tokens for tokens in plain)][:WIDTH])

    def misses(_: SuccessorMatrix, roots_B: Tensor, shape: Template) -> Tensor:
        return absent[shape.flat[1]].expand(len(roots_B), -1)

    monkeypatch.setattr(proposing, "retrieve", misses)
    monkeypatch.setattr(proposing.Texts, "draft", lambda self: 0)  # splice copies nothing
    found, filled = watched(target, drafter, prompts, settings, fixed)
    assert [row.tokens for row in found.rows] == plain
    assert len(filled) > 2 * SHORTEST, "or the target's answers are too short for this test"
    assert filled == [number // SHORTEST in (0, 2) for number in range(len(filled))]
    assert all(row.stages["d0"] == row.rounds for row in found.rows)
    if not fixed:
        always, every = watched(target, drafter, prompts, replace(settings, graft_fill="always"), fixed)
        assert [row.tokens for row in always.rows] == plain and all(every)
        assert sum(row.nodes for row in found.rows) < sum(row.nodes for row in always.rows)


def test_where_it_hits_every_round_is_filled(
    target: Target, drafter: Eagle3, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's own next word is retrieved, and none of those behind it."""
    plain = [row.tokens for row in decode(target, None, prompts, Settings("ar", NEW)).rows]
    follows = torch.zeros(320, dtype=torch.int64)
    for tokens in plain:
        follows[torch.tensor(tokens[:-1])] = torch.tensor(tokens[1:])

    def hits(_: SuccessorMatrix, roots_B: Tensor, shape: Template) -> Tensor:
        found = roots_B.unsqueeze(1)
        for level in shape.levels:
            found = torch.cat([found, (follows[found[:, level.parents]] + level.ranks) % 320], 1)
        return found[:, 1:].masked_fill(torch.tensor([len(path) > 1 for path in shape.paths]), -1)

    monkeypatch.setattr(proposing, "retrieve", hits)
    monkeypatch.setattr(filling, "WINDOW", SHORTEST)
    found, filled = watched(target, drafter, prompts, GRAFT, False)
    assert [row.tokens for row in found.rows] == plain
    assert len(filled) > SHORTEST and all(filled)


def test_a_cold_matrix_knows_of_earlier_prompts_whether_retrieval_paid() -> None:
    """And nothing else: the measured prompts find it empty, in whatever order the decoders take turns."""
    found: list[tuple[int, int]] = []

    class Booking(FakeDecode):
        def __call__(self, *given: Any, **named: Any) -> Decoded:
            if (matrix := named["matrix"]) is not None:
                found.append((matrix.filled, matrix.filling.rounds))
                matrix.filling = matrix.filling.after(2, 1)
                matrix.rows[5] = 1
            return super().__call__(*given, **named)

    recipe = fake_recipe(decoders=["ar", "graft"], matrix="cold")
    harness.evaluate(recipe, cast(Target, FakeTarget()), fake_drafter(), fake_prompts(3), decode=Booking())
    assert found == [(0, 0), (0, 0), (0, 1), (0, 2)]  # the first warms up
