"""Aggregation: sums, cuts, loops, categories, turns, rotation and matrix states, with a fake decoder."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from data_prep.prompts import Prompt
from eval import harness
from eval.decode import RowResult
from eval.outcome import encode
from eval.plan import check_settings, plan
from eval.settings import Settings
from models.target import Target
from recipes.schema import DECODERS, Recipe, TargetConfig, UserError
from tests.eval.fakes import FakeDecode, FakeTarget, fake_drafter, fake_prompts, fake_recipe

DRAFTER = fake_drafter()


def run(recipe: Recipe, prompts: Sequence[Prompt], decode: FakeDecode, **more: Any) -> dict[str, dict[str, Any]]:
    target = cast(Target, more.pop("target", FakeTarget()))
    tables = harness.evaluate(recipe, target, DRAFTER, prompts, decode=decode, **more)
    return {table["decoder"]: table for table in tables}


def test_tau_is_a_ratio_of_sums_and_the_prefill_token_belongs_to_no_round() -> None:
    def answer(ids: list[int], n: int) -> list[int]:
        return list(range(40, 40 + (3 if ids[11] == ord("0") else n)))  # the first prompt ends early

    def accepts(settings: Settings) -> float:
        return 0.0 if settings.decoder == "ar" else 3.0

    tables = run(fake_recipe(max_new_tokens=13), fake_prompts(2), FakeDecode(answer=answer, accepts=accepts))
    overall = tables["eagle"]["overall"]
    # 2 tokens in 1 round and 12 tokens in 3: tau 14 / 4, where a mean of the prompts' own ratios would be 3
    assert (overall["tokens"], overall["rounds"], overall["tau"]) == (16, 4, 3.5)
    assert overall["tau_without_bonus"] == 11 / 4
    assert tables["ar"]["overall"]["tau"] == 1.0
    assert tables["ar"]["overall"]["speedup"] == 1.0
    assert overall["speedup"] == pytest.approx(3.5)
    assert overall["tokens_per_s"] == pytest.approx(14 / 0.04)


def test_what_was_cut_does_not_count() -> None:
    """5 tokens after prefill at 3 drafts a round: 4 + 1, so the second round emits a single accepted draft."""
    tables = run(fake_recipe(max_new_tokens=6), fake_prompts(2), FakeDecode(accepts=lambda s: 3.0))
    overall = tables["eagle"]["overall"]
    assert overall["tau"] == pytest.approx(5 / 2)
    assert overall["tau_without_bonus"] == pytest.approx(4 / 2)


def test_acceptance_by_position_and_milliseconds() -> None:
    tables = run(
        fake_recipe(decoders=["ar", "chain"], chain_length=3), fake_prompts(2), FakeDecode(accepts=lambda s: 1.0)
    )
    overall = tables["chain"]["overall"]
    assert overall["acceptance_by_position"][0] == 1.0
    assert overall["acceptance_by_position"][1:] == [0.0, 0.0]
    assert overall["ms_per_round_total"] == pytest.approx(10.0)
    assert overall["ms_per_round"] == pytest.approx(
        {"draft": 2.5, "retrieve": 0, "verify": 5.0, "accept": 1.25, "cache": 0}
    )


def test_acceptance_by_context_follows_the_answer_as_it_grows() -> None:
    """Prompts of 23 and 524 tokens, 3 drafts a round: rounds begin at the prompt's length and then 4 tokens on each."""
    prompts = [fake_prompts(1)[0], Prompt("long", ["x" * 521], "chat")]
    recipe = fake_recipe(decoders=["ar", "chain"], max_new_tokens=57)
    bins = run(recipe, prompts, FakeDecode(accepts=lambda s: 3.0))["chain"]["overall"]["acceptance_by_context"]
    lengths = [start + 4 * k for start in (len("u:question 0 of turn 0\n"), 524) for k in range(14)]
    expected = {64: sum(n < 128 for n in lengths), 512: sum(n >= 512 for n in lengths)}
    assert {b["from"]: b["rounds"] for b in bins} == expected
    assert all(b["accepted_per_round"] == pytest.approx(3.0) for b in bins)


def test_the_repetition_rate_counts_4_grams_seen_before_in_the_same_output() -> None:
    def answer(ids: list[int], n: int) -> list[int]:
        return [65, 66, 67] * 3 if ids[11] == ord("0") else list(range(40, 49))

    table = run(fake_recipe(max_new_tokens=9), fake_prompts(2), FakeDecode(answer=answer))["chain"]
    assert table["overall"]["repetition_rate"] == pytest.approx(
        3 / 12
    )  # 6 4-grams an output, 3 of them new in the first


def test_loops_are_flagged_once_for_every_decoder_and_left_out_beside() -> None:
    def answer(ids: list[int], n: int) -> list[int]:
        return [65] * n if ids[11] == ord("0") else [65 + (k * k) % 53 for k in range(n)]

    tables = run(fake_recipe(max_new_tokens=40), fake_prompts(3), FakeDecode(answer=answer))
    for table in tables.values():
        loops = table["overall"]["loops"]
        assert (loops["flagged"], loops["without"]["prompts"]) == (1, 2)
        assert [row["loop"] for row in table["per_prompt"]] == [True, False, False]


def test_every_category_has_the_same_fields() -> None:
    prompts = [*fake_prompts(2, category="math"), replace(fake_prompts(3)[2], category="chat")]
    table = run(fake_recipe(), prompts, FakeDecode())["graft"]
    assert set(table["categories"]) == {"math", "chat"}
    assert table["categories"]["math"]["prompts"] == 2
    assert set(table["categories"]["chat"]) == set(table["overall"])


def test_the_second_turn_follows_the_answer_of_ar() -> None:
    decode = FakeDecode()
    run(fake_recipe(decoders=["ar", "chain"]), fake_prompts(1, turns=2), decode)
    last = [call for call in decode.calls if call.settings.max_new_tokens == 12][-2:]
    assert {call.settings.decoder for call in last} == {"ar", "chain"}
    assert last[0].prompts == last[1].prompts
    assert "turn 1" in FakeTarget().tokenizer.decode(last[0].prompts[0])


def test_decoders_take_turns_at_being_first() -> None:
    decode = FakeDecode()
    run(fake_recipe(decoders=["ar", "chain", "eagle"], chain_length=8), fake_prompts(3), decode)
    measured = [call.settings.decoder for call in decode.calls[-9:]]
    assert measured == ["ar", "chain", "eagle", "chain", "eagle", "ar", "eagle", "ar", "chain"]


def test_the_collector_passes_over_what_is_there_while_decoders_are_timed() -> None:
    """To go through it all takes as long as several prompts, which one decoder would pay for."""
    frozen: list[int] = []

    class Looks(FakeDecode):
        def __call__(self, *given: Any, **named: Any) -> Any:
            frozen.append(gc.get_freeze_count())
            return super().__call__(*given, **named)

    run(fake_recipe(decoders=["ar", "chain"], chain_length=8), fake_prompts(3), Looks())
    assert min(frozen[-6:]) > 10_000 and gc.get_freeze_count() == 0


def test_matrix_states() -> None:
    decode = FakeDecode()
    tables = run(fake_recipe(decoders=["graft"], matrix="warm-2"), fake_prompts(3), decode)
    assert tables["graft"]["settings"]["matrix"] == "warm-2"
    assert tables["graft-cold"]["settings"]["matrix"] == "cold"
    measured = [call for call in decode.calls[-9:] if call.settings.decoder == "graft"]
    ids = [id(call.matrix) for call in measured]
    assert len(set(ids)) == 4  # one carried through three prompts, and a fresh one for each
    warm = decode.calls[0]
    assert (len(warm.prompts), id(warm.matrix)) == (2, max(ids, key=ids.count))


def test_warm_up_prompts_are_never_measured_ones() -> None:
    prompts = fake_prompts(4)
    with pytest.raises(UserError, match="only 1 are at hand"):
        run(fake_recipe(), prompts, FakeDecode(), warmup=[*prompts, Prompt("other", ["something else"])])


def test_batches_share_a_clock() -> None:
    tables = run(fake_recipe(batch_size=2), fake_prompts(4), FakeDecode())
    assert tables["ar"]["overall"]["tokens_per_s"] == pytest.approx(200.0)  # two rows at 100 tokens/s each
    assert tables["ar"]["overall"]["ms_per_round_total"] == pytest.approx(10.0)


def test_long_prompts_are_named_and_the_others_answered() -> None:
    prompts = [*fake_prompts(2), Prompt("long", ["x" * 500], "chat")]
    tables = run(fake_recipe(max_prompt=100), prompts, FakeDecode())
    assert tables["ar"]["overall"]["prompts"] == 2
    assert tables["ar"]["skipped"] == [{"id": "long", "turn": 1, "tokens": 503, "limit": 100}]
    with pytest.raises(UserError, match="every prompt is longer"):
        run(fake_recipe(max_prompt=4), fake_prompts(2), FakeDecode())


def test_no_prompts_are_refused() -> None:
    with pytest.raises(UserError, match="no prompts"):
        run(fake_recipe(), [], FakeDecode())


def test_results_are_written_whole(tmp_path: Path) -> None:
    run(fake_recipe(), fake_prompts(3), FakeDecode(), out=tmp_path / "eval")
    names = sorted(path.name for path in (tmp_path / "eval").iterdir())
    assert names == sorted(
        ["report.md", "report.png", "results.json"]
        + [f"results-{name}.json" for name in ("ar", "chain", "eagle", "graft", "graft-cold")]
    )


def test_outputs_that_differ_from_ar_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Wrong(FakeDecode):
        def _row(self, ids: list[int], settings: Settings) -> RowResult:
            row = super()._row(ids, settings)
            return replace(row, tokens=row.tokens[:-1]) if settings.decoder == "eagle" else row

    decode = Wrong()
    monkeypatch.setattr("eval.lossless.generate", lambda target, prompts, n: [decode.answer(ids, n) for ids in prompts])
    tables = run(fake_recipe(lossless=0), fake_prompts(3), decode)
    assert tables["graft"]["overall"]["lossless"] == {"checked": 3, "identical": 3, "near_ties": 0}
    assert tables["eagle"]["overall"]["lossless"] == {"checked": 3, "identical": 0, "near_ties": 0}
    assert "NOT LOSSLESS: eagle differs on 3 prompts" in capsys.readouterr().out


def test_validation_tau_leaves_loops_out_and_is_greedy() -> None:
    def answer(ids: list[int], n: int) -> list[int]:
        return [65] * n if ids[11] == ord("0") else [65 + (k * k) % 53 for k in range(n)]

    decode = FakeDecode(answer=answer, accepts=lambda s: 1.0)
    recipe = fake_recipe(max_new_tokens=41, temperature=1.0)
    tau = harness.validation_tau(recipe, cast(Target, FakeTarget()), DRAFTER, fake_prompts(20), decode=decode)
    assert tau == pytest.approx(2.0)
    assert [(len(call.prompts), call.slots) for call in decode.calls] == [(20, 16)]
    assert decode.calls[0].settings.temperature == 0.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": -0.5}, "eval.temperature=-0.5"),
        ({"top_p": 0.0}, "eval.top_p=0.0"),
        ({"top_p": 1.5}, "eval.top_p=1.5"),
        ({"top_k": -1}, "eval.top_k"),
        ({"depth": 0}, "eval.depth=0: must be 1 or more"),
        ({"nodes": 0}, "eval.nodes"),
        ({"branch": 0}, "eval.branch"),
        ({"max_new_tokens": 0}, "eval.max_new_tokens"),
        ({"decoders": ["eagel"]}, "some of ar, chain, eagle, talon"),
        ({"matrix": "lukewarm"}, "cold, carried or warm-N"),
        ({"matrix": "warm-0"}, "cold, carried or warm-N"),
        ({"gates": [2.0, 0.1, 0.1]}, "three numbers from 0 to 1"),
        ({"gates": [0.1, 0.1]}, "three numbers from 0 to 1"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words.replace("(", r"\(")):
        check_settings(fake_recipe(**changes))


def test_a_tuned_plan_compares_eagle_and_graft_at_one_budget() -> None:
    def shape(decoder: str, depth: int, nodes: int, speed: float) -> dict[str, Any]:
        policy = {"verifier": "match", "paths": 1, "draft_temperature": 0.0, "draft_top_p": 1.0}
        tree = {"depth": depth, "branch": 4, "nodes": nodes, "gates": [0.4], "parallel": False}
        return {**tree, **policy, "tokens_per_s": speed, "decoder": decoder}

    tuned = {
        "best": {
            "chain": shape("chain", 2, 2, 30.0),
            "eagle": shape("eagle", 3, 9, 31.0),
            "graft": shape("graft", 2, 4, 33.0),
        }
    }
    entries = {entry.label: entry for entry in plan(fake_recipe(), tuned)}
    assert list(entries) == ["ar", "chain", "chain-7", "eagle", "graft", "graft-cold"]
    assert (entries["eagle"].settings.depth, entries["eagle"].settings.nodes) == (2, 4)
    assert entries["graft"].settings.gates == (0.4,)
    assert (entries["chain"].settings.depth, entries["chain-7"].settings.depth) == (2, 7)
    assert not entries["chain-7"].timed


def test_without_a_drafter_those_are_left_that_need_none() -> None:
    entries = plan(fake_recipe(decoders=list(DECODERS)), drafter=False)
    assert [(entry.label, entry.matrix) for entry in entries] == [
        ("ar", ""),
        ("recycle", "warm-2"),
        ("lookup", ""),
        ("suffix", ""),
    ]
    assert [entry.settings.depth for entry in entries[2:]] == [10, 40]
    assert all(entry.gates_from == "" for entry in entries)


def test_a_prompt_brings_its_own_tools_and_template_arguments(tiny_target: Callable[..., Target]) -> None:
    target = tiny_target()
    plain, template = Prompt("a", ["a b"]), target.tokenizer.chat_template
    own = replace(plain, template_args={"mood": "x y z"}, tools=[{"name": "f"}])
    try:
        target.tokenizer.chat_template = "{{ mood }}{{ tools[0]['name'] if tools }}" + template
        recipe = replace(fake_recipe(), target=TargetConfig(template_args={"mood": "a"}))
        texts = [target.tokenizer.decode(encode(target, recipe, prompt)) for prompt in (plain, own)]
    finally:
        target.tokenizer.chat_template = template
    assert texts[0].startswith("a<s>") and texts[1].startswith("x y zf<s>")
