"""Every acceptance rule: exact by enumeration, the rule that its paper tells, and safe where laws are extreme."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eval import rules_tree
from eval.rules import RULES, TABLE, Rule
from eval.rules_traversal import Promotion, promotion
from eval.rules_tree import along
from eval.verify import Drafts, Stops
from tests.eval import slow_rules
from tests.eval.enumeration import (
    Found,
    Table,
    aftermath,
    all_drafts,
    enumerate_rule,
    matched,
    random_table,
    tossed,
)

SIZES = [(paths, length) for paths in (1, 2, 3) for length in (1, 2, 3)]


def promotions(drafts: Drafts) -> Tensor:
    """How likely the coin of each drafted token is to come up, in the one rule that tosses them."""
    promo = promotion(drafts)
    return Promotion.share(drafts.q, drafts.p, along(drafts, promo.gain), along(drafts, promo.cost)) / drafts.p


def found(rule: Rule, draft: Table, target: Table, paths: int, length: int) -> Found:
    case = all_drafts(draft, target, paths, length)
    if rule.name == "promoted":
        case = tossed(case, promotions)
    future = aftermath(draft, target, length) if rule.name == "greedy_block" else None
    return enumerate_rule(rule.stops, case, future)


def pair(seed: int, length: int) -> tuple[Table, Table]:
    """A draft and a target table; every other pair has a draft that is near its target."""
    target, other = random_table(2 * seed, length + 1), random_table(2 * seed + 1, length + 1)
    return (target + other) / 2 if seed % 2 else other, target


def listed(laws: int, large: bool) -> list[tuple[Rule, int, int, int]]:
    """Every lossless rule at every size it is for; the largest size has 20,000 drafts and 600,000 with coins."""
    sizes = [size for size in SIZES if (size == (3, 3)) == large]
    return [(rule, *size, laws) for rule in TABLE for size in sizes if rule.lossless and (rule.several or size[0] == 1)]


def show(value: object) -> str:
    return value.name if isinstance(value, Rule) else str(value)


@pytest.mark.parametrize(("rule", "paths", "length", "laws"), listed(50, False) + listed(2, True), ids=show)
def test_the_output_law_is_the_targets(rule: Rule, paths: int, length: int, laws: int) -> None:
    for seed in range(laws):
        assert found(rule, *pair(seed, length), paths, length).distance < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "paths", "length", "laws"), listed(50, True), ids=show)
def test_the_output_law_is_the_targets_at_the_largest_size(rule: Rule, paths: int, length: int, laws: int) -> None:
    test_the_output_law_is_the_targets(rule, paths, length, laws)


def lookup(table: Table) -> slow_rules.Law:
    def law(context: slow_rules.Path) -> list[float]:
        number = 0
        for token in context:
            number = table.shape[1] * number + 1 + token
        return [float(x) for x in table[number]]

    return law


def said_by(stops: Stops, drafts: Drafts) -> slow_rules.Said:
    """{tokens: probability} of a single draft."""
    said: slow_rules.Said = {}
    for node in range(stops.law.shape[1]):
        chance = float(stops.law[0, node])
        depth, path = (int(x[0]) for x in drafts.place(torch.tensor([node])))
        law = stops.after(torch.tensor([node]))[0]
        if chance > 0 and float(law.sum()) > 0:
            context = tuple(drafts.tokens[0, path, :depth].tolist())
            said |= {(*context, x): chance * float(law[x] / law.sum()) for x in range(len(law)) if law[x] > 0}
    return said


def by_hand(rule: Rule, draft: Table, target: Table, drafts: Drafts) -> slow_rules.Said:
    """The same rule by plain loops."""
    p, q = lookup(draft), lookup(target)
    paths = [tuple(path) for path in drafts.tokens[0].tolist()]
    if rule.name != "promoted":
        said: slow_rules.Said = getattr(slow_rules, rule.name)(paths, p, q)
        return said
    promo = promotion(drafts)

    def up(context: slow_rules.Path, count: int) -> list[float]:
        path = next(k for k, tokens in enumerate(paths) if tokens[: len(context)] == context)
        node = int(drafts.nodes[0, path, len(context)])
        gain, cost = float(promo.gain[0, node]), float(promo.cost[0, node])
        return [min(a, max(0.0, b * gain - a * cost)) for a, b in zip(p(context), q(context), strict=True)]

    return slow_rules.promoted(paths, promo.flags[0].tolist(), up, p, q)


@pytest.mark.parametrize("rule", TABLE, ids=show)
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 3))
def test_the_rule_is_the_one_that_its_paper_tells(rule: Rule, seed: int, paths: int, length: int) -> None:
    source = torch.Generator().manual_seed(seed)
    draft, target = pair(seed, length)
    case = all_drafts(draft, target, paths if rule.several else 1, length)
    row = torch.multinomial(case.chance, 1, generator=source)
    d = case.drafts
    coins = torch.rand(1, *d.tokens.shape[1:], generator=source, dtype=torch.float64)
    drafts = Drafts(d.tokens[row], d.draft[row], d.target[row], coins)
    with patch.object(rules_tree, "SOLVE", 60):  # SpecTr's factor to the end, as the loop has it
        ours, theirs = said_by(rule.stops(drafts), drafts), by_hand(rule, draft, target, drafts)
    for said in ours.keys() | theirs.keys():
        assert ours.get(said, 0.0) == pytest.approx(theirs.get(said, 0.0), abs=1e-9)


@pytest.mark.parametrize(("paths", "length"), [(1, 1), (1, 3), (2, 2), (3, 2)])
def test_sample_and_match_is_exact_and_stops_where_eagles_rule_does(paths: int, length: int) -> None:
    for seed in range(10):
        draft, target = pair(seed, length)
        case = all_drafts(draft, target, paths, length)
        assert enumerate_rule(matched, case).distance < 1e-12
        if seed == 0:
            walked, ruled = matched(case.drafts), RULES["tree"].stops(case.drafts)
            assert torch.allclose(walked.law, ruled.law, atol=1e-12)
            for node in range(walked.law.shape[1]):
                at, here = torch.full((len(case.chance),), node), walked.law[:, node] > 1e-9
                one, other = (stops.after(at)[here] for stops in (walked, ruled))
                assert torch.allclose(one / one.sum(1, keepdim=True), other / other.sum(1, keepdim=True), atol=1e-9)
