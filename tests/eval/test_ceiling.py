"""What no rule can pass, and how near the rules come: linear programmes over toy laws (docs/verification.md quotes)."""

import pytest
import torch

from eval.rules import RULES
from tests.eval.ceiling import ceiling, first_token_ceiling, gbv_by_flow, meant, owed_after
from tests.eval.enumeration import Table, all_drafts, enumerate_rule, start_of
from tests.eval.test_rules import found, pair


def one_token(draft: list[float], target: list[float]) -> tuple[Table, Table]:
    after = [[1 / len(draft)] * len(draft)] * len(draft)
    return torch.tensor([draft, *after], dtype=torch.float64), torch.tensor([target, *after], dtype=torch.float64)


def test_the_ceiling_of_one_token_is_the_formula() -> None:
    """0.69 on the example of methods.md 4.5, where SpecTr-GBV's formula says 0.68."""
    draft, target = one_token([0.1, 0.9], [0.5, 0.5])
    assert first_token_ceiling(draft[0], target[0], 2) == pytest.approx(0.69, abs=1e-12)
    assert ceiling(draft, target, 2, 1, changed=False) == pytest.approx(0.69, abs=1e-9)
    assert sum(meant(draft, target, 2, 1)[(x,)] for x in (0, 1)) == pytest.approx(0.68, abs=1e-12)
    for seed in range(10):
        p, q = pair(seed, 1)
        for paths in (1, 2, 3):
            expected = first_token_ceiling(p[0], q[0], paths)
            assert ceiling(p, q, paths, 1, changed=False) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("paths", "length"), [(1, 2), (1, 3), (2, 1), (3, 1), (2, 2), (3, 2)])
def test_no_rule_passes_the_ceiling(paths: int, length: int) -> None:
    for seed in range(4):
        draft, target = pair(seed, length)
        most = {changed: ceiling(draft, target, paths, length, changed) for changed in (False, True)}
        assert most[False] <= most[True] + 1e-9
        for rule in RULES.values():
            if rule.lossless and (rule.several or paths == 1):
                accepted = found(rule, draft, target, paths, length).accepted
                assert accepted <= most[rule.name == "greedy_block"] + 1e-9
                if rule.name == "greedy_block":  # the best there is of one path, if the target may be changed
                    assert accepted == pytest.approx(most[True], abs=1e-8)


@pytest.mark.parametrize(("paths", "length"), [(1, 2), (2, 1), (3, 1), (2, 2), (3, 2)])
def test_an_exact_spectr_gbv_exists_and_accepts_what_its_paper_claims(paths: int, length: int) -> None:
    """Its masses G are feasible: a flow over prefixes, found by a linear programme over all multisets of drafts, gives
    every prefix exactly its G. With the target of the rest of the block changed to what is left, its output is exact.
    """
    for seed in range(3):
        draft, target = pair(seed, length)
        rule = gbv_by_flow(draft, target, paths, length)
        result = enumerate_rule(
            rule, all_drafts(draft, target, paths, length), owed_after(draft, target, paths, length)
        )
        assert result.distance < 1e-7, "as exact as the solver"
        masses = meant(draft, target, paths, length)
        assert result.accepted == pytest.approx(sum(g for w, g in masses.items() if w), abs=1e-7)
        assert len(result.reached) == start_of(length + 1, target.shape[1])


def test_the_best_rule_that_is_shipped_is_near_the_ceiling() -> None:
    """Means over ten laws, half of them with a draft near its target: what docs/verification.md says."""
    for paths, length in ((2, 1), (3, 1), (2, 2)):
        laws = [pair(seed, length) for seed in range(10)]
        best = sum(found(RULES["promoted"], *law, paths, length).accepted for law in laws)
        plain = sum(found(RULES["traversal"], *law, paths, length).accepted for law in laws)
        most = sum(ceiling(*law, paths, length, changed=False) for law in laws)
        assert plain < best <= most + 1e-9
        assert best > 0.95 * most
