"""The two benchmarks of acceptance rules, at sizes for a CPU: what they print, and that what they count is right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from eval.rules import TABLE, rule_of
from recipes.schema import UserError
from scripts import bench_rules, bench_verifiers
from tests.tiny import tiny_drafter


def test_every_rule_has_a_line_with_its_cost(capsys: pytest.CaptureFixture[str]) -> None:
    bench_rules.main(["vocab=40", "length=3", "paths=2", "batch=2", "rounds=10", "device=cpu"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = {line[0]: line for line in lines[2:]}
    for rule in TABLE:
        _, paths, ms, launches, _ = found[rule.name]
        assert int(paths) == (2 if rule.several else 1) and float(ms) > 0 and int(launches) > 10
    assert float(found["match"][2]) > 0
    assert any(line[0] == "(faults)" for line in lines)


def test_launches_and_whole_writes_are_counted() -> None:
    x = torch.rand(4, 100)
    with bench_rules.Counter(400) as counter:
        y = x * 2  # writes all
        z = y[:2]  # a view
        z.add_(1)  # writes half
        y.sum(1)  # writes little
        torch.empty(4, 100)  # writes nothing
    assert (counter.launches, counter.copies) == (3, 1)


def test_rules_are_compared_with_token_verification_on_the_same_prompts(tiny_target: Callable[..., Any]) -> None:
    target = tiny_target("llama", initializer_range=0.1)
    drafter = tiny_drafter(target, [i for i in range(320) if i % 5], noise=0.0)
    prompts = [[5, 9, 3, 7, n] for n in range(2, 8)]
    options = bench_verifiers.OWN | {"lengths": "2", "paths": "2", "batch": "4", "tokens": "12", "temperatures": "1.0"}
    rows, left = bench_verifiers.compare(target, drafter, prompts, 1.0, options)
    assert left == [] and rows[0].settings.decoder == "ar" and rows[0].tau == 1
    for row in rows:
        rule_of(row.settings)
        assert len(row.emitted) == len(prompts) and row.seconds > 0
    judged = {row.settings.verifier for row in rows if row.settings.paths == 2}
    assert judged == {rule.name for rule in TABLE if rule.several and rule.name != "tree"} | {"match"}
    assert {bench_verifiers.paths_of(row) for row in rows if row.drafts == "greedy"} == {1, 2}
    lines = bench_verifiers.table(rows).splitlines()
    assert len(lines) == 2 + len(rows)
    assert all(line.count("|") == 9 for line in lines)
    assert sum("not lossless" in line for line in lines) == 1
    few, rest = bench_verifiers.compare(target, drafter, prompts, 1.0, options | {"seconds": "0"})
    assert len(few) + len(rest) == len(rows) and rest


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"paths": "1,4"}, "paths=1,4: must be one number above 0"),
        ({"lengths": "4,x"}, "lengths=4,x: must be numbers"),
        ({"batch": "0"}, "batch=0"),
        ({"rules": "block,magic"}, "magic is not one of"),
    ],
)
def test_words_that_are_no_numbers_or_rules_are_refused(words: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        bench_verifiers.checked(words)
    assert bench_verifiers.checked({"lengths": "4,8", "rules": "block,match"})["paths"] == "4"
