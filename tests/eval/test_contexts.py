"""Costs by context, against a decoder whose price grows with its prompts."""

import copy
import functools
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from eval import tune, tunings
from eval.contexts import PASSES, TOKENS, by_context
from eval.decode import Decoded, decode
from eval.outcome import encode
from eval.settings import Settings
from models.target import Target
from recipes.schema import UserError
from tests.eval.fakes import FakeDecode, FakeTarget, fake_drafter, fake_prompts, fake_recipe

TARGET, DRAFTER, PROMPTS = cast(Target, FakeTarget()), fake_drafter(), fake_prompts(18)


def recipe(size: int = 1) -> Any:
    return fake_recipe(decoders=["ar", "chain", "eagle"], max_new_tokens=64, batch_size=size)


class Growing(FakeDecode):
    """A row costs a step's hundredth, and a step's tenth more a hundred tokens of context."""

    def __init__(self, held: Callable[[Settings, int], bool] = lambda settings, tokens: True) -> None:
        super().__init__()
        self.held, self.frozen = held, list[int]()  # whether memory holds that

    def __call__(
        self, target: Any, drafter: Any, prompts: list[list[int]], settings: Settings, *given: Any, **more: Any
    ) -> Decoded:
        longest = max(map(len, prompts))
        self.frozen.append(gc.get_freeze_count())
        if not self.held(settings, longest):
            raise MemoryError
        rows = settings.most
        self.cost = lambda s: 10 + 0.1 * rows + rows * longest / 100
        return super().__call__(target, drafter, prompts, settings, *given, **more)


@functools.cache
def choice(size: int) -> dict[str, Any]:
    return tune.tune(recipe(size), TARGET, DRAFTER, PROMPTS, decode=Growing())


def tuned(size: int = 1) -> dict[str, Any]:
    return copy.deepcopy(choice(size))


def measured(found: dict[str, Any], decode: FakeDecode, size: int = 1) -> list[dict[str, Any]]:
    return by_context(recipe(size), TARGET, DRAFTER, PROMPTS, found, decode=decode)


@pytest.mark.parametrize("size", [1, 3])
def test_each_context_has_the_rounds_of_its_own_length_and_the_taus_of_the_tuner(size: int) -> None:
    decode, found = Growing(), tuned(size)
    found["chosen"] = found["best"]["chain"] | {"depth": 2, "nodes": 2, "tau": 1.5}  # not the best chain
    rows = measured(found, decode, size)
    assert [row["context"] for row in rows] == [512, 2048]  # eval.max_prompt
    assert len(decode.calls) == 2 * 3 * PASSES and min(decode.frozen) > 10_000
    assert {call.settings.max_new_tokens for call in decode.calls} == {TOKENS}
    for row in rows:
        for name, meant in (("chain", found["chosen"]), ("eagle", found["best"]["eagle"])):
            cost = 10 + meant["nodes"] * (0.1 + row["context"] / 100)
            assert row["ms_per_round"][name] == pytest.approx(cost)
            assert row["tokens_per_s"][name] == pytest.approx(1000 * size * meant["tau"] / cost)
        assert row["tokens_per_s"]["ar"] == pytest.approx(100 * size)


def test_prompts_are_validation_prompts_end_to_end_with_a_whole_one_last() -> None:
    decode = Growing()
    measured(tuned(3), decode, 3)
    texts = [encode(TARGET, recipe(), prompt) for prompt in PROMPTS]
    for call in decode.calls:
        assert len({len(ids) for ids in call.prompts}) == 1
        for row, ids in enumerate(call.prompts):
            assert ids[-len(texts[row]) :] == texts[row]
            assert ids[-len(texts[row]) - 9 : -len(texts[row])] == texts[row - 1][-9:]


def test_a_round_is_one_of_the_full_batch_whatever_a_row_says(
    tiny_target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token of this target's ends an answer."""
    target = tiny_target()
    monkeypatch.setattr(target, "eos_ids", frozenset(range(target.vocab_size)))  # the target is shared by tests
    given = [[5, 6, 7], [8, 9]]
    settings = Settings("ar", max_new_tokens=6)
    assert decode(target, None, given, settings).rounds_total == 0
    assert decode(target, None, given, settings, ends=frozenset()).rounds_total == 5


def test_it_is_told_where_the_choice_loses() -> None:
    found = tuned()
    assert found["chosen"]["decoder"] != "ar"
    assert tunings.context_lines(found) == []  # nothing was measured
    found["contexts"] = measured(found, Growing())
    *lines, last = tunings.context_lines(found)
    assert [line.split(" tokens")[0] for line in lines] == ["At 512", "At 2,048"]
    assert last.endswith("at 2,048 tokens plain decoding is faster.")
    assert set(lines) <= set(tunings.lines(found))


def test_what_memory_does_not_hold_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    decode, found = Growing(lambda settings, tokens: tokens < 1000), tuned()
    found["contexts"] = measured(found, decode)
    assert [row["context"] for row in found["contexts"]] == [512]
    assert "out of memory at 2,048 tokens of context, batch 1: ar, " in capsys.readouterr().out
    assert min(decode.frozen) > 10_000 and gc.get_freeze_count() == 0


def test_a_decoder_that_memory_does_not_hold_is_not_said_to_lose(capsys: pytest.CaptureFixture[str]) -> None:
    found = tuned()
    chosen = found["chosen"]["decoder"]
    found["contexts"] = measured(found, Growing(lambda settings, tokens: settings.decoder != chosen))
    assert f"batch 1: {chosen}\n" in capsys.readouterr().out
    assert all(line.startswith("At ") and chosen not in line for line in tunings.context_lines(found))


def test_what_others_left_in_memory_is_no_reason() -> None:
    """The very first try fails."""
    tries: list[str] = []

    def held(settings: Settings, tokens: int) -> bool:
        tries.append(settings.decoder)
        return len(tries) > 1

    found = tuned()
    decode = Growing(held)
    assert {*measured(found, decode)[0]["tokens_per_s"]} == {"ar", "chain", "eagle"}
    assert tries.count("ar") == 1 + 2 * PASSES and tries.count("eagle") == 2 * PASSES


def test_a_context_that_cannot_be_told_from_plain_decoding_is_no_loss() -> None:
    found, speeds = tuned(), {"ar": 100.0, "chain": 96.0}
    found["chosen"] = found["best"]["chain"]
    found["contexts"] = [{"context": 512, "ms_per_round": speeds, "tokens_per_s": speeds}]
    assert len(tunings.context_lines(found)) == 1
    speeds["chain"] = 94.0
    assert len(tunings.context_lines(found)) == 2


WHOLE = {"context": 512, "ms_per_round": {"ar": 1.0}, "tokens_per_s": {"ar": 1.0}}


@pytest.mark.parametrize(
    "damage",
    [
        None,
        "none",
        [7],
        [{"context": 512}],
        [WHOLE | {"context": "512"}],
        [WHOLE | {"context": -1}],
        [WHOLE | {"tokens_per_s": {"ar": 0}}],
        [WHOLE | {"tokens_per_s": {"chain": 2.0}}],
        [WHOLE | {"ms_per_round": {"ar": float("nan")}}],
        [WHOLE | {"ms_per_round": {"ar": 1.0, "# a heading": 1.0}}],
    ],
)
def test_damaged_contexts_are_refused_before_anything_is_measured(tmp_path: Path, damage: Any) -> None:
    found = tuned() | {"drafter": "", "contexts": damage}
    path = tmp_path / tunings.FILE
    path.write_text(json.dumps({"schema": tunings.SCHEMA, "entries": {"batch 1, T = 0": found}}))
    with pytest.raises(UserError, match=r"tuned\.json is not a tuned\.json of ours"):
        tunings.check(tmp_path)
