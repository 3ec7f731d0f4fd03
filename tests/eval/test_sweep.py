"""The batch sweep: the baseline at each size, the tuner's choice there, whole batches, and sizes that do not fit."""

from pathlib import Path
from typing import Any, cast

import pytest

from data_prep.prompts import Prompt
from eval import report, tune, tunings
from eval.plan import at_batch
from eval.settings import Settings
from eval.sweep import filled, sweep
from models.target import Target
from tests.eval.fakes import FakeDecode, FakeTarget, fake_drafter, fake_prompts, fake_recipe
from tests.eval.test_memory import Cramped

TARGET, DRAFTER = cast(Target, FakeTarget()), fake_drafter()


class Batched(FakeDecode):
    """A machine on which a drafted row costs more the more rows the batch has, and plain decoding does not."""

    def __call__(self, target: Any, drafter: Any, prompts: list[list[int]], *more: Any, **named: Any) -> Any:
        def cost(s: Settings) -> float:
            return 10.0 if s.decoder == "ar" else 10.0 + 0.5 * s.nodes * len(prompts)

        self.cost = cost
        return super().__call__(target, drafter, prompts, *more, **named)


def test_every_size_has_its_own_baseline_and_whole_batches() -> None:
    decode = Batched(accepts=lambda s: 0.0 if s.decoder == "ar" else 1.0)
    recipe = fake_recipe(batch_sizes=[4, 1], decoders=["ar", "chain"], chain_length=2, max_new_tokens=13)
    sizes = sweep(recipe, TARGET, DRAFTER, fake_prompts(6, turns=2), decode=decode, warmup=fake_prompts(0))
    assert [size["batch_size"] for size in sizes] == [1, 4]
    for size in sizes:
        rows = size["batch_size"]
        assert size["fits"] == rows and size["prompts"] == 6
        assert size["decoders"]["ar"]["speedup"] == 1.0
        assert size["decoders"]["ar"]["tokens_per_s"] == pytest.approx(100.0 * rows)
        assert size["decoders"]["chain"]["speedup"] == pytest.approx(2.0 * 10 / (10 + 1.0 * rows))
    assert {len(call.prompts) for call in decode.calls} == {1, 4}


def test_the_last_batch_is_filled_with_copies() -> None:
    prompts = fake_prompts(3)
    assert filled(prompts, 3) == prompts
    assert [p.turns for p in filled(prompts, 8)] == [prompts[k % 3].turns for k in range(8)]
    assert len({p.id for p in filled(prompts, 64)}) == 64
    assert filled([], 4) == list[Prompt]()


def test_the_tuners_choice_is_read_or_measured_a_size_and_off_where_nothing_beats_ar(tmp_path: Path) -> None:
    decode = Batched(accepts=lambda s: 0.0 if s.decoder == "ar" else 1.0)
    recipe = fake_recipe(batch_sizes=[1, 32], decoders=["ar", "chain"], tune=True, max_new_tokens=64)
    sizes = sweep(recipe, TARGET, DRAFTER, fake_prompts(4), tmp_path, decode=decode, warmup=fake_prompts(40)[8:])
    assert sizes[0]["choice"].startswith("chain") and sizes[1]["choice"] == "off (nothing surely beats ar)"
    assert list(tmp_path.iterdir()) == [], "only eval.tune writes beside a drafter"
    (tmp_path / "model.safetensors").write_bytes(b"a drafter")
    calls, warmup = len(decode.calls), fake_prompts(40)[8:]
    known, beside = (tune.tune(at_batch(recipe, n), TARGET, DRAFTER, warmup, decode=Batched()) for n in (1, 32))
    tunings.write(tmp_path, beside)
    again = sweep(recipe, TARGET, DRAFTER, fake_prompts(4), tmp_path, known, decode=decode, warmup=warmup)
    assert [size["choice"] for size in again] == [size["choice"] for size in sizes]
    assert len(decode.calls) - calls < calls / 2  # nothing is tuned again
    table = report.batch_table(sizes)
    assert "| off (nothing surely beats ar) |" in table and "| 32 |" in table


@pytest.mark.parametrize("tunes", [False, True])
def test_a_size_that_does_not_fit_ends_the_sweep_with_the_largest_that_does(tunes: bool) -> None:
    """Tuned or not: the tuner, which finds no room for `ar`, does not take the other sizes with it."""
    decode = Cramped(room=5 * 30)
    recipe = fake_recipe(batch_sizes=[1, 8, 16], decoders=["ar", "chain"], tune=tunes)
    sizes = sweep(recipe, TARGET, DRAFTER, fake_prompts(4), decode=decode, warmup=fake_prompts(9)[4:] if tunes else [])
    assert [(size["batch_size"], size["fits"], size["out_of_memory"]) for size in sizes] == [(1, 1, []), (8, 4, [8])]
    assert "| 8: out of memory, 4 fits |" in report.batch_table(sizes)
