"""What is evaluated on stays out of training: whole prompts are left out, n-grams are counted."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from data_prep.contamination import contamination, evaluation_sets, sift, warnings
from data_prep.duplicates import words
from data_prep.prompts import Prompt
from data_prep.schemas import Record, Rendered, Tokenised
from recipes.schema import EvalConfig, Recipe

LONG = "please tell me how many foxes jump over the lazy dog in one day"


def test_prompts_of_every_evaluation_set_are_left_out() -> None:
    pairs: list[tuple[str, Record]] = [
        ("s", Prompt("same", [LONG]).conversation()),
        ("s", Prompt("near", [LONG.replace("one day", "one week"), "and then?"]).conversation()),
        ("s", Prompt("second", ["something else", "what about it"]).conversation()),
        ("s", Prompt("fine", ["how do trains stay on their rails in the rain"]).conversation()),
        ("s", Prompt("again", ["How do trains stay on their rails, in the rain?"]).conversation()),
        ("s", Prompt("other", ["how do trains stay on their rails in the rain"], system="be brief").conversation()),
        ("s", Rendered("text", LONG.upper())),
        ("s", Tokenised("ids", [5, 6, 7], [0, 1, 1])),
    ]
    sets = {"report": [Prompt("r", [LONG])], "eval.prompts": [Prompt("e", ["something else", "what about it"])]}
    kept, fell = sift(pairs, sets, lambda ids: "nothing of the kind")
    assert [r.id for _, r in kept] == ["fine", "other", "ids"]
    assert fell == {"in_report": 3, "in_eval_prompts": 1, "repeated": 1}


def test_the_recipes_own_evaluation_prompts_are_a_set() -> None:
    assert [*evaluation_sets(Recipe())] == ["report"]
    own = replace(Recipe(), eval=EvalConfig(prompts="report", limit=3))
    assert len(evaluation_sets(own)["report"]) == 24  # all that ship, however few are measured


texts = st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=14).map(" ".join), max_size=5)


@given(texts, texts)
def test_ngrams_are_counted_as_their_wording_says(training: list[str], evaluated: list[str]) -> None:
    prompts = [Prompt(str(i), [t]) for i, t in enumerate(evaluated)]
    [found] = contamination([[t] for t in training], {"set": prompts}).values()
    heavy = touched = total = hits = 0
    for prompt in evaluated:
        parts = words(prompt)
        n = min(8, len(parts))
        grams = {tuple(parts[i : i + n]) for i in range(len(parts) - n + 1)}
        there = {g for g in grams if any(f" {' '.join(g)} " in f" {t} " for t in training)}
        total, hits = total + len(grams), hits + len(there)
        touched += bool(there)
        heavy += len(there) >= len(grams) / 2
    expected = {"prompts": len(evaluated), "touched": touched, "heavy": heavy, "ngrams": total, "found": hits}
    assert {k: found[k] for k in expected} == expected
    assert bool(warnings({"set": found})) == (heavy > 0)


def test_the_warning_names_the_prompt_and_what_it_shares() -> None:
    sets = {"eval.prompts": [Prompt("e7", [LONG])], "validation": [Prompt("v", ["nothing shared with anybody at all"])]}
    found = contamination([["Well, " + LONG + " of the year"]], sets)
    [warning] = warnings(found)
    assert "1 of the 1 prompts of eval.prompts" in warning and "e7 100%" in warning and "foxes jump over" in warning
