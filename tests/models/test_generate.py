"""Batched generation against transformers, and outputs that do not depend on what is decoded beside them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eval.decode import decode
from eval.settings import Settings
from models import generate as module
from models.generate import generate
from models.target import Target
from recipes.schema import UserError

NEW = 12
LENGTHS = (5, 9, 3, 14, 7, 7, 2, 20)
HEAT = [0.7, 1.0, 0.0, 1.0, 1.3, 0.5, 1.0, 0.0]


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def target(request: pytest.FixtureRequest, tiny_target: Callable[..., Any]) -> Target:
    found: Target = tiny_target(request.param)
    return found


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    source = torch.Generator().manual_seed(0)
    return [torch.randint(2, 320, (n,), generator=source).tolist() for n in LENGTHS]


def by_transformers(target: Target, prompt: list[int], new: int, stops: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=stops,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def run(target: Target, prompts: list[list[int]], slots: int, **changes: Any) -> list[list[int]]:
    options: dict[str, Any] = {"max_new_tokens": NEW, "temperatures": HEAT, "seed": 1, "stop_ids": target.eos_ids}
    return generate(target, prompts, slots=slots, **(options | changes))


def test_greedy_equals_transformers_with_fewer_slots_than_prompts(target: Target, prompts: list[list[int]]) -> None:
    free = [by_transformers(target, p, NEW, [1]) for p in prompts]
    stop = free[0][4]  # a token that really comes up, so that rows end early and are replaced
    expected = [by_transformers(target, p, NEW, [1, stop]) for p in prompts]
    ours = run(target, prompts, 3, temperatures=[0.0] * 8, stop_ids=frozenset({1, stop}))
    assert ours == expected
    assert len(ours[0]) <= 5 and ours[0][-1] == stop  # the end token is part of the output


def test_a_sampled_output_depends_on_seed_index_and_prompt_alone(target: Target, prompts: list[list[int]]) -> None:
    first = run(target, prompts, 8)
    assert run(target, prompts, 1) == first == run(target, prompts, 3)
    assert run(target, prompts, 8, seed=2) != first
    # other prompts beside it, of other lengths and so taken in another order
    others = [prompts[i] if i in (1, 4) else list(reversed(prompts[-1 - i])) for i in range(8)]
    again = run(target, others, 3)
    assert again[1] == first[1] and again[4] == first[4]
    assert run(target, [prompts[0], prompts[0]], 2, temperatures=[1.0, 1.0])[0] != first[1]


def test_greedy_rows_among_sampled_ones_stay_greedy(target: Target, prompts: list[list[int]]) -> None:
    ours = run(target, prompts, 3)
    for row in (2, 7):
        assert ours[row] == by_transformers(target, prompts[row], NEW, [1])


def test_equal_prompts_at_t_above_0_get_noise_of_their_own(target: Target, prompts: list[list[int]]) -> None:
    outputs = run(target, [prompts[0]] * 6, 6, temperatures=[1.0] * 6)
    assert len({tuple(tokens) for tokens in outputs}) > 3


def test_limits_are_a_prompts_own(target: Target, prompts: list[list[int]]) -> None:
    limits = [1, 7, 0, 3, 12, 2, 5, 4]
    ours = run(target, prompts, 3, temperatures=[0.0] * 8, max_new_tokens=limits, stop_ids=frozenset())
    assert [len(tokens) for tokens in ours] == limits
    full = run(target, prompts, 8, temperatures=[0.0] * 8, stop_ids=frozenset())
    assert ours == [tokens[:limit] for tokens, limit in zip(full, limits, strict=True)]


def test_progress_tells_prompts_and_tokens(target: Target, prompts: list[list[int]]) -> None:
    seen: list[tuple[int, int]] = []
    outputs = run(target, prompts, 3, progress=lambda done, tokens: seen.append((done, tokens)))
    assert seen == sorted(seen) and seen[-1] == (8, sum(map(len, outputs)))


def test_nothing_to_do(target: Target) -> None:
    assert run(target, [], 3, temperatures=[]) == []
    assert run(target, [[5, 6]], 3, temperatures=[0.0], max_new_tokens=0) == [[]]


def test_sampling_follows_the_targets_law(tiny_target: Callable[..., Any]) -> None:
    target: Target = tiny_target("llama", vocab_size=8, initializer_range=0.4)
    prompt, rows, heat = [2, 5, 3], 3000, 0.8
    outputs = run(target, [prompt] * rows, 1000, temperatures=[heat] * rows, max_new_tokens=1)
    law = (target.logits(target.features(torch.tensor([prompt])).final_BTH[0, -1]).double() / heat).softmax(-1)
    counts = torch.bincount(torch.tensor(outputs).flatten(), minlength=8)
    spread = (rows * law * (1 - law)).sqrt()
    assert ((counts - rows * law).abs() < 4.5 * spread + 1).all()


@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=60), most=st.integers(1, 9))
def test_prefills_hold_little_padding_and_every_prompt_once(lengths: list[int], most: int) -> None:
    prompts = [[0] * n for n in sorted(lengths, reverse=True)]
    waiting, seen = [*range(len(prompts))], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PREFILL", 1000)
        while waiting:
            batch = module._together(waiting, prompts, most)
            sizes = [len(prompts[i]) for i in batch]
            padded = max(sizes) * len(sizes)
            assert len(batch) <= most and padded < 2 * sum(sizes) and (padded <= 1000 or len(batch) == 1)
            seen += batch
    assert seen == [*reversed(range(len(prompts)))]


def test_a_target_that_gives_no_numbers_is_refused(tiny_target: Callable[..., Any], prompts: list[list[int]]) -> None:
    damaged = tiny_target("llama", seed=77)
    damaged.final_norm.data[0] = torch.nan
    with pytest.raises(UserError, match="not numbers"):
        run(damaged, prompts, 4)
    with pytest.raises(UserError, match="not numbers"):
        decode(damaged, None, prompts[:1], Settings("ar", NEW))
