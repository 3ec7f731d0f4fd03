"""What the rules accept, against closed forms; what they do where laws are extreme, large, or half precise."""

import itertools
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eval import rules_traversal, rules_tree
from eval.rules import RULES, TABLE, Rule, verify
from eval.rules_chain import Carry, changed, greedy_block, owed
from eval.verify import Drafts
from models.sampling import draw
from models.sampling import law as sampling_law
from tests.eval.enumeration import Table, all_drafts, enumerate_rule, joint, random_table, start_of
from tests.eval.test_rules import found, pair, show

LOSSLESS = [rule for rule in TABLE if rule.lossless]
DRAFTING = [rule for rule in LOSSLESS if rule.laws]


def accepted(name: str, draft: Table, target: Table, paths: int, length: int) -> float:
    return found(RULES[name], draft, target, paths, length).accepted


@pytest.mark.parametrize("seed", range(50))
def test_one_path_accepts_what_the_formulas_say(seed: int) -> None:
    draft, target = pair(seed, 3)
    least = torch.minimum(draft[0], target[0]).sum()
    for rule in DRAFTING:
        assert accepted(rule.name, draft, target, 1, 1) == pytest.approx(float(least), abs=1e-12)
    both = [torch.minimum(joint(draft, i), joint(target, i)).sum() for i in (1, 2, 3)]
    by = {name: accepted(name, draft, target, 1, 3) for name in ("token", "block", "greedy_block")}
    assert by["greedy_block"] == pytest.approx(float(sum(both)), abs=1e-12)
    assert by["token"] <= by["block"] + 1e-12 <= by["greedy_block"] + 2e-12
    for name in ("multipath", "traversal", "promoted"):
        assert accepted(name, draft, target, 1, 3) == pytest.approx(by["block"], abs=1e-12)


@pytest.mark.parametrize("rule", DRAFTING, ids=show)
def test_a_draft_of_the_targets_own_law_is_accepted_whole(rule: Rule) -> None:
    table = random_table(3, 3)
    for paths in (1, 2, 3) if rule.several else (1,):
        if rule.name != "multipath":  # which keeps one of several paths by its rank, and so another law
            with patch.object(rules_tree, "SOLVE", 60):
                assert accepted(rule.name, table, table, paths, 2) == pytest.approx(2, abs=1e-9)


@pytest.mark.parametrize("paths", [2, 3, 4])
def test_promotion_accepts_everything_where_the_laws_are_close_enough(paths: int) -> None:
    """Between c and C times the draft the first child has the target's own law; here q/p lies between 0.6 and 1.4."""
    draft, target = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.35, 0.3, 0.35]])
    tables = [torch.cat([x, random_table(1, 1)[1:]]).double() for x in (draft, target)]
    assert accepted("promoted", tables[0], tables[1], paths, 1) > 0.998
    with patch.object(rules_traversal, "SOLVE", 60):
        assert accepted("promoted", tables[0], tables[1], paths, 1) == pytest.approx(1, abs=1e-9)
    assert accepted("token", tables[0], tables[1], 1, 1) == pytest.approx(0.85, abs=1e-7)
    assert accepted("spectr", tables[0], tables[1], paths, 1) < 0.999


@pytest.mark.parametrize(
    ("paths", "draft", "target", "said"),
    [(2, [0.1, 0.9], [0.5, 0.5], [0.34, 0.66]), (7, [0.9, 0.1], [0.3, 0.7], [0.72, 0.28])],
)
def test_the_released_spectr_gbv_is_biased(
    paths: int, draft: list[float], target: list[float], said: list[float]
) -> None:
    p, q = (torch.tensor([law, [0.5, 0.5], [0.5, 0.5]], dtype=torch.float64) for law in (draft, target))
    result = enumerate_rule(RULES["spectr_gbv"].stops, all_drafts(p, q, paths, 1))
    assert result.distance == pytest.approx(abs(said[0] - target[0]), abs=5e-3)
    assert not RULES["spectr_gbv"].lossless


@pytest.mark.parametrize(("paths", "length"), [(1, 2), (2, 2), (3, 2), (2, 3)])
def test_the_released_spectr_gbv_is_biased_on_random_laws(paths: int, length: int) -> None:
    rule = RULES["spectr_gbv"]
    distances = [found(rule, *pair(2 * seed, length), paths, length).distance for seed in range(6)]
    assert sum(distances) / 6 > 0.03


def rounds_of_greedy_block(draft: Table, target: Table, length: int, tokens: int, pays: bool) -> float:
    """Total variation of the first tokens of many rounds of greedy block verification, every end of each followed."""
    vocab, waiting, said = target.shape[1], {}, torch.zeros(len(target), dtype=torch.float64)
    none = Carry(torch.zeros(1, length - 1, dtype=torch.float64), torch.zeros(1, length - 1, dtype=torch.int64))
    waiting[(0, ())] = (1.0, none)
    words = torch.tensor(list(itertools.product(range(vocab), repeat=length)))
    while waiting:
        (context, _), (mass, carry) = waiting.popitem()
        at = torch.full((len(words), 1), context)
        for i in range(length):
            at = torch.cat([at, vocab * at[:, -1:] + 1 + words[:, i : i + 1]], 1)
        p, q = draft[at[:, :-1]], target[at]
        drafts = Drafts(words.unsqueeze(1), p, q, torch.zeros(len(words), 1, length))
        debt = Carry(carry.log_ratio.expand(len(words), -1), carry.left.expand(len(words), -1))
        chance = mass * p.gather(2, words.unsqueeze(2)).flatten(1).prod(1)
        stops = greedy_block(changed(drafts, debt)[0])
        for node, token in itertools.product(range(length + 1), range(vocab)):
            ends, tokens_B = (torch.full((len(words),), x) for x in (node, token))
            law = stops.after(ends)
            part = chance * stops.law[:, node] * law[:, token] / law.sum(1).clamp(min=1e-300)
            after = owed(drafts, debt, ends, tokens_B)
            for row in (part > 1e-16).nonzero().flatten().tolist():
                new = vocab * int(at[row, node]) + 1 + token
                if new >= start_of(tokens, vocab):  # cut what is too long
                    while new >= start_of(tokens + 1, vocab):
                        new = (new - 1) // vocab
                    said[new] += part[row]
                    continue
                left = after.left[row : row + 1] if pays else torch.zeros_like(after.left[:1])
                key = (new, tuple(left[0].tolist()))  # what is owed is told by where the owing rounds began
                before = waiting[key][0] if key in waiting else 0.0
                waiting[key] = (before + float(part[row]), Carry(after.log_ratio[row : row + 1], left))
    ours = said[start_of(tokens, vocab) : start_of(tokens + 1, vocab)]
    return float((ours - joint(target, tokens)).abs().sum() / 2)


@pytest.mark.parametrize(("length", "tokens"), [(2, 4), (3, 4), (3, 5)])
def test_greedy_block_verification_is_exact_over_many_rounds_if_it_pays_what_it_owes(length: int, tokens: int) -> None:
    for seed in range(3):
        draft, target = (random_table(2 * seed + i, tokens + length + 1, vocab=2) for i in (0, 1))
        assert rounds_of_greedy_block(draft, target, length, tokens, pays=True) < 1e-12
        assert rounds_of_greedy_block(draft, target, length, tokens, pays=False) > 1e-3


def sharp_pair(seed: int, length: int) -> tuple[Table, Table]:
    """Laws with zeros, one-hot laws, laws that share little and laws that are equal."""
    source = torch.Generator().manual_seed(seed)
    tables = []
    for _ in range(2):
        logits = torch.randn(start_of(length + 2, 3), 3, generator=source, dtype=torch.float64)
        heat = float(0.02 * 100 ** torch.rand(1, generator=source, dtype=torch.float64))
        tables.append(sampling_law(logits, heat, top_p=(0.6, 0.9, 1.0)[seed % 3]))
    twin = torch.rand(len(tables[0]), 1, generator=source) < 0.2
    return tables[0], torch.where(twin, tables[0], tables[1])


@pytest.mark.parametrize("rule", LOSSLESS, ids=show)
@pytest.mark.parametrize(("paths", "length"), [(1, 3), (2, 2), (3, 2), (2, 3)])
def test_laws_with_zeros_and_one_hot_laws(rule: Rule, paths: int, length: int) -> None:
    if rule.several or paths == 1:
        for seed in range(12):
            assert found(rule, *sharp_pair(seed, length), paths, length).distance < 1e-12


def sampled(source: torch.Generator, p: Table, q: Table, rows: int, paths: int, length: int) -> Drafts:
    """Drafts of a Markov drafter and target, laws [V, V] by the last token; the first one follows token 0."""
    tokens = [torch.zeros(rows, paths, dtype=torch.int64)]
    for _ in range(length):
        tokens.append(torch.multinomial(p[tokens[-1].flatten()], 1, generator=source).view(rows, paths))
    nodes = torch.cat([tokens[0][:, :1], *tokens[1:]], 1)
    coins = torch.rand(rows, paths, length, generator=source, dtype=torch.float64)
    return Drafts(torch.stack(tokens[1:], 2), p[nodes[:, : 1 + (length - 1) * paths]], q[nodes], coins)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 2), st.floats(0.01, 2), st.floats(0.2, 1), st.sampled_from([1, 2, 4]))
def test_extreme_temperatures_give_tokens_that_the_target_can_say(
    seed: int, heat: float, draft_heat: float, top_p: float, paths: int
) -> None:
    source = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(2, 40, 40, generator=source)
    q, p = sampling_law(logits[0], heat, top_p=top_p), sampling_law(logits[1] + logits[0], draft_heat)
    drafts = sampled(source, p, q, 50, paths, 4)
    for rule in DRAFTING:
        if paths == 1 or rule.several:
            stops = rule.stops(drafts)
            assert stops.law.isfinite().all() and (stops.law > -1e-12).all()
            assert torch.allclose(stops.law.sum(1), torch.ones(50, dtype=torch.float64), atol=1e-4)
            uniforms = torch.rand(50, 2, generator=source, dtype=torch.float64)
            path, count, token = verify(rule, drafts, uniforms)
            for row in range(50):
                said = [
                    0,
                    *drafts.tokens.transpose(1, 2).flatten(1)[row, path[row, 1 : count[row] + 1] - 1],
                    token[row],
                ]
                assert all(float(q[a, b]) > 0 for a, b in itertools.pairwise(map(int, said)))


@pytest.mark.parametrize("rule", DRAFTING, ids=show)
def test_single_precision_laws_give_nearly_the_same_stops(rule: Rule) -> None:
    source = torch.Generator().manual_seed(1)
    p, q = torch.randn(2, 200, 200, generator=source, dtype=torch.float64).mul(2).softmax(2)
    drafts = sampled(source, p, (p + q) / 2, 100, 3 if rule.several else 1, 4)
    half = Drafts(drafts.tokens, drafts.draft.float(), drafts.target.float(), drafts.coins)
    assert torch.allclose(rule.stops(drafts).law, rule.stops(half).law, atol=1e-5)


def grouped(law: Tensor, groups: int) -> Tensor:
    """The group of each token, so that every group has about the same probability."""
    order = law.argsort(descending=True)
    return torch.empty_like(order).scatter_(0, order, (law[order].cumsum(0) * groups).long().clamp(max=groups - 1))


@pytest.mark.slow
@pytest.mark.parametrize("rule", LOSSLESS, ids=show)
def test_a_thousand_tokens_by_chance(rule: Rule) -> None:
    """Chi-square of the first two tokens, in 8 x 8 groups, over 16,000 rounds."""
    source = torch.Generator().manual_seed(11)
    logits = 2 * torch.randn(1000, 1000, generator=source, dtype=torch.float64)
    q = logits.softmax(1)
    p = (logits + 0.8 * torch.randn(1000, 1000, generator=source, dtype=torch.float64)).softmax(1)
    pairs = q[0].unsqueeze(1) * q
    one, other = grouped(q[0], 8), grouped(pairs.sum(0), 8)
    cells = one.unsqueeze(1) * 8 + other
    expected = torch.zeros(64, dtype=torch.float64).index_add(0, cells.flatten(), pairs.flatten())
    counts, rounds, some = torch.zeros(64, dtype=torch.float64), 0, 0
    length = 1 if rule.name == "greedy_block" else 2  # longer blocks of it change the target that follows
    for _ in range(32):
        drafts = sampled(source, p, q, 500, 3 if rule.several else 1, length)
        path, count, token = verify(rule, drafts, torch.rand(500, 2, generator=source, dtype=torch.float64))
        spoken = drafts.tokens.transpose(1, 2).flatten(1).gather(1, (path[:, 1:] - 1).clamp(min=0))
        first = torch.where(count > 0, spoken[:, 0], token)
        own = draw(q[first], torch.rand(500, generator=source, dtype=torch.float64))
        second = torch.where(count > 1, spoken[:, -1], torch.where(count == 1, token, own))
        counts += torch.bincount(cells[first, second], minlength=64)
        rounds, some = rounds + 500, some + int((count > 0).sum())
    chi = float(((counts - rounds * expected) ** 2 / (rounds * expected)).sum())
    assert chi < 63 + 4 * (2 * 63) ** 0.5
    assert some > rounds / 100
