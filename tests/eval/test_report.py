"""The verdict says what the table says, in each case, and the page carries what a reader must know."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from eval import harness, plots, report
from eval.settings import Settings
from eval.verdict import outcome, verdict
from models.target import Target
from tests.eval.fakes import FakeDecode, FakeTarget, fake_drafter, fake_prompts, fake_recipe

Price = Callable[[Settings], float]


def tables(cost: Price, prompts: int = 12, **changes: Any) -> list[dict[str, Any]]:
    decode = FakeDecode(cost=cost)
    target, drafter = cast(Target, FakeTarget()), fake_drafter()
    return harness.evaluate(fake_recipe(**changes), target, drafter, fake_prompts(prompts), decode=decode)


def price(**by_decoder: float) -> Price:
    return lambda settings: by_decoder.get(settings.decoder, 10.0)


def test_it_pays_and_the_fastest_is_named() -> None:
    text = verdict(tables(price(chain=15.0, eagle=14.0, graft=12.0)))
    assert text.startswith("It pays. Serve with **graft** (60 nodes, depth 8, top-10")
    assert "1.5" in text and "over 12 prompts" in text
    assert "draft length tried is 7, which pays too" in text


def test_several_paths_are_no_chain_that_engines_serve() -> None:
    warm: dict[str, Any] = {"temperature": 1.0, "decoders": ["ar", "chain", "eagle"]}
    cost = price(chain=15.0, eagle=12.0)
    assert "In an engine that serves chains alone" in verdict(tables(cost, **warm))
    assert "In an engine that serves chains alone" not in verdict(tables(cost, **warm, paths=3))


def test_a_rule_that_is_not_lossless_is_called_so_in_the_verdict() -> None:
    warm: dict[str, Any] = {"temperature": 1.0, "decoders": ["ar", "chain"], "paths": 3}
    assert "not lossless" not in verdict(tables(price(chain=12.0), **warm))
    assert "3 paths of 7 sampled drafts, spectr_gbv, not lossless)" in verdict(
        tables(price(chain=12.0), **warm, verifier="spectr_gbv")
    )


def test_it_does_not_pay() -> None:
    text = verdict(tables(price(chain=30.0, eagle=40.0, graft=50.0)))
    assert text.startswith("It does not pay")
    assert "**chain** (7 drafts in a row)" in text
    assert text.endswith("Serve without speculation.")


def test_it_is_not_shown_either_way() -> None:
    """A decoder that is as fast as `ar` on average, twice as fast here and half as fast there."""
    prices = iter([9.0, 33.0] * 100)
    text = verdict(tables(lambda s: next(prices) if s.decoder == "chain" else 10.0, decoders=["ar", "chain"]))
    assert text.startswith("Not shown to pay")
    assert "that interval holds 1" in text


def test_one_prompt_shows_nothing() -> None:
    text = verdict(tables(price(chain=5.0), prompts=1, decoders=["ar", "chain"]))
    assert text.startswith("Not shown to pay")
    assert "too few to tell" in text


def test_five_prompts_show_nothing_though_their_interval_does_not_hold_1() -> None:
    fast = price(chain=5.0)
    few, enough = (verdict(tables(fast, prompts=n, decoders=["ar", "chain"])) for n in (5, 6))
    assert few.startswith("Not shown to pay") and "over 5 prompts, which are too few to tell" in few
    assert enough.startswith("It pays")


def test_ar_alone_is_no_gain() -> None:
    assert "no gain to report" in verdict(tables(price(), decoders=["ar"]))


def test_a_control_that_reads_otherwise_than_the_verdict_is_told() -> None:
    recipe = fake_recipe(max_new_tokens=30, decoders=["ar", "graft"])
    found = harness.evaluate(recipe, cast(Target, FakeTarget()), fake_drafter(), fake_prompts(9), decode=FakeDecode())
    for decoder, interval in (("graft", [0.96, 1.22]), ("graft-cold", [1.03, 1.23])):
        table = next(t for t in found if t["decoder"] == decoder)
        for figures in (table["overall"], table["overall"]["loops"]["without"]):
            figures.update(speedup=1.1, speedup_ci95=interval)
    assert verdict(found).startswith("Not shown to pay")
    assert "graft from a cold matrix for every prompt, reads 1.10x [1.03, 1.23]" in verdict(found)


def test_the_verdict_leaves_loops_out_and_says_so_when_they_would_turn_it() -> None:
    loops = 4

    def answer(ids: list[int], n: int) -> list[int]:
        return [65] * n if chr(ids[11]) in "0123" else [65 + (k * k) % 53 for k in range(n)]

    def cost(settings: Settings) -> float:
        return 10.0 if settings.decoder == "ar" else 24.0

    decode = FakeDecode(answer=answer, cost=cost)
    recipe = fake_recipe(max_new_tokens=30, decoders=["ar", "chain"])
    found = harness.evaluate(recipe, cast(Target, FakeTarget()), fake_drafter(), fake_prompts(9), decode=decode)
    assert found[1]["overall"]["loops"]["flagged"] == loops
    assert "over 5 prompts, flagged loops left out" in verdict(found)


def test_the_page_is_one_page_and_says_how_it_was_measured() -> None:
    found = tables(price(chain=15.0, eagle=14.0, graft=12.0))
    text = report.page(found, None)
    for words in (
        "max_new_tokens 12",
        "tau = tokens emitted by rounds / rounds",
        "float32",
        "threads",
        "On a CPU verification is not free",
        "Retrieval at the same budget (graft beside eagle)",
        "accepted drafts: 100 % from drafter",
        "Gates of graft (0.15/0.14/0.5): published for another target; eval.calibrate finds those of an EAGLE-3 "
        "drafter; rounds that each stopped (none: drafted to the end): 100 % at none.",
        "graft against eagle, the fastest of what is drafted alone: ",
        "From a cold matrix",
        "| graft |",
        "0 of them flagged as loops",
        "Not checked",
    ):
        assert words in text, words
    assert len(text.splitlines()) < 80


def test_shares_are_of_their_sum() -> None:
    assert report.shares({"d0": 6, "none": 2, "d5": 0}, "at") == "75 % at d0, 0 % at d5, 25 % at none"


@pytest.mark.parametrize(("eagle", "prune", "fastest"), [(14.0, 17.0, "eagle"), (17.0, 14.0, "prune")])
def test_retrieval_is_held_against_the_fastest_tree_without_it(eagle: float, prune: float, fastest: str) -> None:
    found = tables(price(eagle=eagle, prune=prune), decoders=["ar", "eagle", "prune", "graft"])
    speeds = {t["decoder"]: t["overall"]["tokens_per_s"] for t in found}
    against = {t["decoder"]: t["against"] for t in found}
    assert against["ar"] is None and against["prune"] is None
    assert against["graft"]["decoder"] == fastest
    assert against["graft"]["speedup"] == pytest.approx(speeds["graft"] / speeds[fastest])
    assert against["graft"]["speedup_ci95"] == pytest.approx([against["graft"]["speedup"]] * 2)  # one price for all


def test_a_slow_baseline_is_owned_up_to() -> None:
    found = tables(price())
    found[0]["checks"] = {
        "dtype": "float32",
        "speed": {"prompts": 2, "ar_tokens_per_s": 10.0, "generate_tokens_per_s": 20.0},
        "decoders": {"ar": {}, "graft": {"checked": 12, "identical": 10, "near_ties": 1, "diverged": ["p3"]}},
        "generate": {"checked": 12, "identical": 12, "near_ties": 0, "diverged": []},
    }
    text = "\n".join(report.lossless_lines(found))
    assert "SLOWER" in text
    assert "12 checked, 10 identical, 1 proven near-ties, **1 NOT LOSSLESS**: p3." in text


def test_both_conventions_of_tau_and_the_repetition_stand_in_the_table() -> None:
    rows = report.main_table(tables(price())).splitlines()
    head, chain = ([cell.strip() for cell in row.strip("|").split("|")] for row in (rows[0], rows[3]))
    found = dict(zip(head, chain, strict=True))
    assert found["decoder"] == "chain"
    # 11 tokens after prefill in 6 rounds, the last one cut before its bonus
    assert (found["tau [95 %]"].split()[0], found["drafts a round"]) == ("1.83", "1.00")
    assert found["repeated"].endswith(" %")


def test_partings_are_counted_in_steps_of_the_dtype() -> None:
    def parting(gap: float, exact: float | None) -> dict[str, Any]:
        return {"gap": gap, "exact_gap": exact, "step": 0.0625}

    (line,) = report.parting_line("graft", "bfloat16", [parting(0.0, 0.01), parting(0.125, 0.03), parting(2.0, None)])
    assert "(3 places): 2 within two steps of bfloat16" in line
    assert "median 2.0 steps, most 32.0" in line and "0.03 apart at the median" in line
    assert report.parting_line("graft", "float32", []) == []


def test_nobody_on_the_front_is_beaten() -> None:
    def point(ms: float, tau: float) -> dict[str, Any]:
        return {"ms_per_round_total": ms, "tau": tau}

    ar, good, bad, dear = point(10, 1.0), point(12, 2.0), point(13, 1.5), point(30, 3.0)
    assert plots.front([ar, good, bad, dear]) == [ar, good, dear]
    assert plots.front([ar, dict(ar)]) == [ar, ar]  # equals do not beat each other


@pytest.mark.parametrize(
    ("interval", "word"), [([1.01, 1.2], "pays"), ([0.8, 0.99], "does not pay"), ([0.9, 1.1], "uncertain")]
)
def test_the_interval_decides(interval: list[float], word: str) -> None:
    assert outcome({"speedup_ci95": interval, "clocks": 6}) == word
    assert outcome({"speedup_ci95": interval, "clocks": 5}) == "uncertain"
