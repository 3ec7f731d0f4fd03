"""Simulated tau is what the decoder gets: the same rounds and the same tokens, on the same prompts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from eval.decode import decode
from eval.settings import Settings
from models import simulate
from models.eagle3 import Eagle3
from models.target import Target
from recipes.schema import UserError
from tests.tiny import tiny_drafter


def apprentice(target: Target, kept: list[int] | None) -> Eagle3:
    """A drafter that has learned from a few of the target's answers, so that chains of every length are accepted."""
    drafter: Eagle3 = tiny_drafter(target, kept, noise=0.02)
    prompts = [simulate.render(target, text) for text in simulate.shipped_prompts(4)]
    prompts = [ids for ids in prompts if len(ids) < 400]
    rows = simulate.generate(
        target, prompts, max_new_tokens=40, temperatures=[0.0] * len(prompts), slots=4, seed=0, stop_ids=target.eos_ids
    )
    optimiser = torch.optim.Adam(drafter.parameters(), 1e-2)
    for _ in range(30):
        loss = torch.zeros(())
        for ids, answer in zip(prompts, rows, strict=True):
            row = torch.tensor(ids + answer)
            T, first = len(row) - 2, len(ids) - 1
            taps = target.features(row[None, :T]).taps_BTC[0]
            state = next(drafter.unroll(taps, target.embed(row[1:]), 1, whole(T)))
            draft = drafter.vocab.to_draft(row[2 + first :])
            loss = loss + torch.nn.functional.cross_entropy(drafter.logits(state[first:]), draft, ignore_index=-1)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return drafter


def whole(T: int) -> simulate.Documents:
    return simulate.Documents([T], torch.device("cpu"))


@pytest.mark.parametrize("kept", [None, [i for i in range(320) if i % 5]], ids=["full", "reduced"])
@pytest.mark.parametrize("length", [1, 4])
def test_it_counts_what_the_decoder_counts(
    tiny_target: Callable[..., Any], kept: list[int] | None, length: int
) -> None:
    target: Target = tiny_target("llama", max_position_embeddings=1024)
    drafter = apprentice(target, kept)
    found = simulate.simulate(target, drafter, count=6, length=length, max_new_tokens=48)
    prompts = [simulate.render(target, text) for text in simulate.shipped_prompts(6)]
    prompts = [ids for ids in prompts if len(ids) <= 1024 - 48 - length - 1]
    chain = Settings("chain", max_new_tokens=48, depth=length, branch=1, nodes=length)
    rows = decode(target, drafter, prompts, chain).rows
    assert found.prompts == len(prompts) and found.rounds == sum(r.rounds for r in rows)
    assert found.tau == pytest.approx(sum(r.emitted for r in rows) / found.rounds)
    for j in range(length):
        offered, accepted = (
            sum(counts[j] for counts in each if j < len(counts))
            for each in ([r.positions_offered for r in rows], [r.positions_accepted for r in rows])
        )
        assert found.by_position[j] == pytest.approx(accepted / offered), j
    assert found.tau > 1.3  # else nothing was compared


def test_ten_prompts_ship_with_it() -> None:
    assert len(set(simulate.shipped_prompts(10))) == 10


def test_a_target_too_short_for_every_prompt_is_said(tiny_target: Callable[..., Any]) -> None:
    target: Target = tiny_target("llama", max_position_embeddings=16)
    with pytest.raises(UserError, match="16 positions"):
        simulate.simulate(target, tiny_drafter(target), count=1)
