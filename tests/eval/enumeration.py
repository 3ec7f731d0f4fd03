"""Exact enumeration of a rule: every draft, its probability, every end of the round, the joint law of what comes out.

Toy laws over a few tokens depend on the whole context. Contexts are numbered like a heap: the empty one is 0, and token
x after context c makes V c + 1 + x, so that a table [contexts, V] holds a law for each.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.tree import merged
from eval.verify import Drafts, Stops, walk

Table = Tensor
NAN = float("nan")


def start_of(level: int, vocab: int) -> int:
    """The number of the first context of so many tokens."""
    return sum(vocab**i for i in range(level))


def random_table(seed: int, length: int, vocab: int = 3, alpha: float = 0.7) -> Table:
    """Dirichlet(alpha) laws for every context of at most `length` tokens."""
    source = torch.Generator().manual_seed(seed)
    concentration = torch.full((start_of(length + 1, vocab), vocab), alpha, dtype=torch.float64)
    weights = torch._standard_gamma(concentration, generator=source)
    return weights / weights.sum(1, keepdim=True)


def joint(table: Table, length: int) -> Tensor:
    """The law of the first `length` tokens [V ** length]."""
    vocab, mass = table.shape[1], torch.ones(1, dtype=torch.float64)
    for level in range(length):
        rows = table[start_of(level, vocab) : start_of(level + 1, vocab)]
        mass = (mass.unsqueeze(1) * rows).flatten()
    return mass


@dataclass(frozen=True)
class Case:
    """All K-tuples of paths of L tokens [n, K, L], how likely each is, and the context at each node [n, 1 + K * L]."""

    drafts: Drafts
    chance: Tensor
    contexts: Tensor
    target: Table
    draft: Table


def all_drafts(draft: Table, target: Table, paths: int, length: int) -> Case:
    """Every draft. The places of nodes that share another's prefix hold NaN: no rule may read them."""
    vocab = target.shape[1]
    words = list(itertools.product(itertools.product(range(vocab), repeat=length), repeat=paths))
    tokens = torch.tensor(words).view(-1, paths, length)
    along = torch.zeros(len(tokens), paths, length + 1, dtype=torch.int64)
    for d in range(length):
        along[..., d + 1] = vocab * along[..., d] + 1 + tokens[..., d]
    contexts = torch.cat([along[:, :1, 0], along[..., 1:].transpose(1, 2).flatten(1)], 1)
    inner = contexts[:, : 1 + (length - 1) * paths]
    drafts = Drafts(tokens, draft[inner], target[contexts], torch.full(tokens.shape, 0.5, dtype=torch.float64))
    chance = draft[along[..., :-1], tokens].prod(2).prod(1)
    shadow = torch.cat([torch.ones(len(tokens), 1, dtype=torch.bool), drafts.own.transpose(1, 2).flatten(1)], 1)
    laws = [
        law.masked_fill(~shadow[:, : law.shape[1]].unsqueeze(2), float("nan"))
        for law in (draft[inner], target[contexts])
    ]
    return Case(Drafts(tokens, laws[0], laws[1], drafts.coins), chance, contexts, target, draft)


def tossed(case: Case, chances: Callable[[Drafts], Tensor]) -> Case:
    """The same drafts with every fall of their coins: `chances` [n, K, L] says how likely each is to come up."""
    keep, weight = torch.arange(len(case.chance)), case.chance
    coins = torch.full(case.drafts.tokens.shape, 0.5, dtype=torch.float64)
    likely = chances(case.drafts)
    for k, d in itertools.product(range(case.drafts.paths), range(case.drafts.length)):
        p = likely[keep, k, d]
        open_ = (p > 0) & (p < 1)
        coins[:, k, d] = torch.where(p >= 1, 0.0, 1.0 - 1e-9)  # up, else down
        twin = coins[open_].clone()
        twin[:, k, d] = 0.0
        keep, coins = torch.cat([keep, keep[open_]]), torch.cat([coins, twin])
        weight = torch.cat([torch.where(open_, weight * (1 - p), weight), (weight * p)[open_]])
    every = case.drafts
    drafts = Drafts(every.tokens[keep], every.draft[keep], every.target[keep], coins)
    return Case(drafts, weight, case.contexts[keep], case.target, case.draft)


@dataclass(frozen=True)
class Found:
    """What came of a rule: total variation between its output and the target's own, extended to L + 1 tokens, the
    expected number of accepted drafts, and the mass that each context is accepted with."""

    distance: float
    accepted: float
    reached: Tensor


def enumerate_rule(rule: Callable[[Drafts], Stops], case: Case, future: Table | None = None) -> Found:
    """Run the rule on every draft and follow every end; `future` is the table that the tokens after the round have,
    the target's if it is not given."""
    length, vocab = case.drafts.length, case.target.shape[1]
    said = torch.zeros(start_of(length + 2, vocab), dtype=torch.float64)
    reached = torch.zeros(start_of(length + 1, vocab), dtype=torch.float64)
    accepted = sum(follow(rule, part, said, reached) for part in parts(case))
    future = case.target if future is None else future
    for level in range(1, length + 1):
        now = slice(start_of(level, vocab), start_of(level + 1, vocab))
        after = slice(start_of(level + 1, vocab), start_of(level + 2, vocab))
        said[after] += (said[now].unsqueeze(1) * future[now]).flatten()
    for level in range(length, 0, -1):
        now = slice(start_of(level, vocab), start_of(level + 1, vocab))
        reached[start_of(level - 1, vocab) : start_of(level, vocab)] += reached[now].view(-1, vocab).sum(1)
    whole = said[start_of(length + 1, vocab) :]
    distance = float((whole - joint(case.target, length + 1)).abs().sum() / 2)
    return Found(distance, accepted, reached)


def parts(case: Case, rows: int = 1 << 15) -> Iterator[Case]:
    """The drafts that can come up, a few at a time."""
    possible = (case.chance > 0).nonzero().flatten()
    for keep in possible.split(rows):
        drafts = Drafts(
            *(x[keep] for x in (case.drafts.tokens, case.drafts.draft, case.drafts.target, case.drafts.coins))
        )
        yield Case(drafts, case.chance[keep], case.contexts[keep], case.target, case.draft)


def follow(rule: Callable[[Drafts], Stops], case: Case, said: Tensor, reached: Tensor) -> float:
    """Add what the rule says and accepts on these drafts; returns their expected number of accepted drafts."""
    drafts, vocab, accepted = case.drafts, case.target.shape[1], 0.0
    stops = rule(drafts)
    assert torch.allclose(stops.law.sum(1), torch.ones_like(case.chance), atol=1e-12), "a round ends somewhere"
    assert (stops.law >= 0).all()
    for node in range(stops.law.shape[1]):
        mass = stops.law[:, node] * case.chance
        here = mass > 0
        law = stops.after(torch.full_like(case.contexts[:, 0], node))[here]
        assert not law.isnan().any() and (law >= 0).all()
        law = torch.where(law.sum(1, keepdim=True) > 0, law, drafts.target[here, node])  # as `settle` does
        law = law / law.sum(1, keepdim=True)
        contexts = case.contexts[here, node]
        ends = (vocab * contexts + 1).unsqueeze(1) + torch.arange(vocab)
        said.index_add_(0, ends.flatten(), (law * mass[here].unsqueeze(1)).flatten())
        reached.index_add_(0, contexts, mass[here])
        accepted += (node + drafts.paths - 1) // drafts.paths * float(mass.sum())
    return accepted


def matched(drafts: Drafts) -> Stops:
    """Sample-and-match as a rule: the walk over the merged tree, for every sequence of the target's draws."""
    B, K, L = drafts.tokens.shape
    vocab = drafts.target.shape[2]
    draws = torch.tensor(list(itertools.product(range(vocab), repeat=L + 1)))
    row = torch.arange(B).repeat_interleave(len(draws))
    tree = merged(torch.zeros(len(row), dtype=torch.int64), drafts.tokens[row])
    chance = torch.ones(len(row), dtype=torch.float64)
    visited = []

    def choose(node_B: Tensor, depth: int) -> Tensor:
        visited.append(node_B)
        return draws.repeat(B, 1)[:, depth]

    path, accepted, bonus = walk(tree, choose)
    for depth, node in enumerate(visited):
        drawn = drafts.target[row, node].gather(1, draws.repeat(B, 1)[:, depth : depth + 1]).squeeze(1)
        chance = chance * torch.where(depth <= accepted, drawn, 1 / vocab)  # later draws change nothing
    end = path.gather(1, accepted.unsqueeze(1)).squeeze(1)
    mass = torch.zeros(B, 1 + K * L, vocab, dtype=torch.float64).index_put((row, end, bonus), chance, accumulate=True)
    return Stops(mass.sum(2), lambda node_B: mass[torch.arange(B), node_B])


def aftermath(draft: Table, target: Table, length: int) -> Table:
    """The target that greedy block verification owes after a block: (q(y x) - p(y x))+ by joint laws from the block's
    start, normalised, after each y of 1 to L - 1 tokens; the target's own elsewhere."""
    table, vocab = target.clone(), target.shape[1]
    for level in range(1, length):
        rows = slice(start_of(level, vocab), start_of(level + 1, vocab))
        q, p = joint(target, level).unsqueeze(1) * target[rows], joint(draft, level).unsqueeze(1) * draft[rows]
        left = (q - p).clamp(min=0.0)
        mass = left.sum(1, keepdim=True)
        table[rows] = torch.where(mass > 0, left / mass, target[rows])
    return table
