"""Costs by context, against a decoder whose price grows with its prompts."""

from typing import Any, cast

from eval import tune, tunings
from eval.contexts import PASSES, by_context
from eval.decode import Decoded
from eval.settings import Settings
from models.target import Target
from tests.eval.fakes import FakeDecode, FakeTarget, fake_drafter, fake_prompts, fake_recipe

TARGET, DRAFTER, PROMPTS = cast(Target, FakeTarget()), fake_drafter(), fake_prompts(18)
RECIPE = fake_recipe(decoders=["ar", "chain", "eagle"], max_new_tokens=64)


class Growing(FakeDecode):
    """A row costs a step's hundredth, and a step's tenth more a hundred tokens of context."""

    def __init__(self, held: int = 10**6) -> None:
        super().__init__()
        self.held = held  # tokens of a prompt that memory holds

    def __call__(
        self, target: Any, drafter: Any, prompts: list[list[int]], settings: Settings, *given: Any, **more: Any
    ) -> Decoded:
        longest = max(map(len, prompts))
        if longest > self.held:
            raise MemoryError
        rows = settings.most
        self.cost = lambda s: 10 + 0.1 * rows + rows * longest / 100
        return super().__call__(target, drafter, prompts, settings, *given, **more)


def tuned() -> dict[str, Any]:
    return tune.tune(RECIPE, TARGET, DRAFTER, PROMPTS, decode=Growing())


def test_each_context_has_the_rounds_of_its_own_length_and_the_taus_of_the_tuner() -> None:
    decode, found = Growing(), tuned()
    rows = by_context(RECIPE, TARGET, DRAFTER, PROMPTS, found, decode=decode)
    assert [row["context"] for row in rows] == [512, 2048]  # eval.max_prompt
    assert {len(call.prompts[0]) for call in decode.calls} == {512, 2048}
    assert len(decode.calls) == 2 * 3 * PASSES
    for row in rows:
        for name in ("chain", "eagle"):
            best = found["best"][name]
            cost = 10 + best["nodes"] * (0.1 + row["context"] / 100)
            assert abs(row["ms_per_round"][name] - cost) < 1e-6
            assert abs(row["tokens_per_s"][name] - 1000 * best["tau"] / cost) < 1e-6
        assert abs(row["tokens_per_s"]["ar"] - 100) < 1e-6


def test_it_is_told_where_the_choice_loses() -> None:
    found = tuned()
    assert found["chosen"]["decoder"] != "ar"
    assert tunings.context_lines(found) == []  # nothing was measured
    found["contexts"] = by_context(RECIPE, TARGET, DRAFTER, PROMPTS, found, decode=Growing())
    *lines, last = tunings.context_lines(found)
    assert [line.split(" tokens")[0] for line in lines] == ["At 512", "At 2,048"]
    assert last.endswith("at 2,048 tokens of context plain decoding is faster.")
    assert set(lines) <= set(tunings.lines(found))


def test_what_memory_does_not_hold_is_left_out(capsys: Any) -> None:
    rows = by_context(RECIPE, TARGET, DRAFTER, PROMPTS, tuned(), decode=Growing(held=1000))
    assert [row["context"] for row in rows] == [512]
    assert "out of memory at 2,048 tokens of context, batch 1" in capsys.readouterr().out
