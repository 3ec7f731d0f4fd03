"""How much any rule could accept, by linear programmes over toy laws, and SpecTr-GBV's masses realised by a flow.

A rule turns K drafted words of L tokens into a stop, one of the prefixes that they show, and a way to go on. The
programmes choose, for every multiset of words, how likely each stop is, and for every stop how much mass goes on to
each text, so that the text has the target's law and the expected number of accepted drafts is the largest.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from scipy.optimize import linprog
from scipy.sparse import coo_matrix
from torch import Tensor

from eval.verify import Drafts, Stops
from tests.eval.enumeration import Table, joint, start_of

Word = tuple[int, ...]


@dataclass
class Programme:
    """A linear programme put together row by row: maximise gains, subject to rows that equal their sides."""

    gains: list[float] = field(default_factory=list)
    sides: list[float] = field(default_factory=list)
    cells: list[tuple[int, int, float]] = field(default_factory=list)

    def variable(self, gain: float = 0.0) -> int:
        self.gains.append(gain)
        return len(self.gains) - 1

    def row(self, terms: list[tuple[int, float]], side: float) -> None:
        self.cells += [(len(self.sides), variable, factor) for variable, factor in terms]
        self.sides.append(side)

    def solve(self) -> tuple[float, list[float]]:
        rows, columns, factors = zip(*self.cells, strict=True)
        matrix = coo_matrix((factors, (rows, columns)), shape=(len(self.sides), len(self.gains))).tocsr()
        found = linprog([-g for g in self.gains], A_eq=matrix, b_eq=self.sides, method="highs")
        assert found.status == 0, found.message
        return -found.fun, list(found.x)


def words(vocab: int, length: int) -> list[Word]:
    return list(itertools.product(range(vocab), repeat=length))


def masses(table: Table, length: int) -> dict[Word, float]:
    """Joint probability of every word of at most `length` tokens."""
    vocab = table.shape[1]
    return {w: float(x) for n in range(length + 1) for w, x in zip(words(vocab, n), joint(table, n), strict=True)}


def multisets(draft: Table, paths: int, length: int) -> dict[tuple[Word, ...], float]:
    """Every multiset of K drafted words and its probability."""
    p, found = masses(draft, length), {}
    for drawn in itertools.combinations_with_replacement(words(draft.shape[1], length), paths):
        orders = math.factorial(paths) / math.prod(math.factorial(n) for n in Counter(drawn).values())
        found[drawn] = orders * math.prod(p[w] for w in drawn)
    return found


def stop_variables(
    programme: Programme, draft: Table, paths: int, length: int
) -> dict[Word, list[tuple[tuple[Word, ...], int, float]]]:
    """A variable for every multiset and every prefix that it shows: how likely the round stops there. For each prefix
    the (multiset, variable, probability of the multiset)."""
    stops: dict[Word, list[tuple[tuple[Word, ...], int, float]]] = {}
    for drawn, chance in multisets(draft, paths, length).items():
        shown = {w[:n] for w in drawn for n in range(length + 1)}
        mine = [(prefix, programme.variable(gain=chance * len(prefix))) for prefix in sorted(shown)]
        programme.row([(variable, 1.0) for _, variable in mine], 1.0)
        for prefix, variable in mine:
            stops.setdefault(prefix, []).append((drawn, variable, chance))
    return stops


def ceiling(draft: Table, target: Table, paths: int, length: int, changed: bool) -> float:
    """The largest expected number of accepted drafts of any exact rule in one round.

    `changed`: the rule may change the target for the rest of the block, as greedy block verification does, so that
    every coupling of drafts and text is open to it; else only the token after a stop is its own.
    """
    programme, vocab, q = Programme(), target.shape[1], masses(target, length)
    stops = stop_variables(programme, draft, paths, length)
    into: dict[Word, list[tuple[int, float]]] = {text: [] for text in words(vocab, length)}
    for prefix, ways in stops.items():  # rows and ways to go on are in units of q, else the small ones are dropped
        terms = [(variable, chance / q[prefix]) for _, variable, chance in ways]
        if len(prefix) == length:
            into[prefix] += terms
            continue
        reach = length if changed else len(prefix) + 1
        onward = []
        for tail in words(vocab, reach - len(prefix)):
            variable, start = programme.variable(), prefix + tail
            onward.append((variable, -q[start] / q[prefix]))
            for rest in words(vocab, length - reach):
                into[start + rest].append((variable, 1.0))
        programme.row(terms + onward, 0.0)
    for terms in into.values():
        programme.row(terms, 1.0)
    return programme.solve()[0]


def first_token_ceiling(draft_V: Tensor, target_V: Tensor, paths: int) -> float:
    """The same for one token in closed form: the least of q(S) + 1 - (1 - p(not S))^K over sets S of tokens."""
    p, q = draft_V.tolist(), target_V.tolist()
    return min(
        sum(q[x] for x in inside) + 1 - (1 - sum(p[x] for x in range(len(p)) if x not in inside)) ** paths
        for n in range(len(p) + 1)
        for inside in itertools.combinations(range(len(p)), n)
    )


def meant(draft: Table, target: Table, paths: int, length: int) -> dict[Word, float]:
    """SpecTr-GBV's masses G = q (1 - (1 - min(1, p/q))^K) of every prefix."""
    p, q = masses(draft, length), masses(target, length)
    return {w: q[w] * (1 - (1 - min(1.0, p[w] / q[w])) ** paths) for w in q}


def gbv_by_flow(draft: Table, target: Table, paths: int, length: int) -> Callable[[Drafts], Stops]:
    """An exact SpecTr-GBV: stops chosen by a linear programme so that every prefix is accepted with exactly its G, and
    the token after a stop drawn from q (1 - min(1, p/q))^K of joint laws, which is q - G."""
    programme, G, vocab = Programme(), meant(draft, target, paths, length), target.shape[1]
    stops = stop_variables(programme, draft, paths, length)
    for prefix in G:
        onward = 0.0 if len(prefix) == length else sum(G[*prefix, x] for x in range(vocab))
        unit = masses(target, len(prefix))[prefix]
        terms = [(variable, chance / unit) for _, variable, chance in stops[prefix]]
        programme.row(terms, (G[prefix] - onward) / unit)
    chosen = programme.solve()[1]
    law = {(drawn, prefix): chosen[v] for prefix, ways in stops.items() for drawn, v, _ in ways}
    left = owed_after(draft, target, paths, length)

    def rule(drafts: Drafts) -> Stops:
        rows = drafts.tokens.tolist()
        found = torch.zeros(len(rows), drafts.target.shape[1], dtype=torch.float64)
        number = torch.zeros(len(rows), drafts.target.shape[1], dtype=torch.int64)
        for row, paths_ in enumerate(rows):
            drawn = tuple(sorted(tuple(path) for path in paths_))
            for k, path in enumerate(paths_):
                for n in range(length + 1):
                    node = int(drafts.nodes[row, k, n])
                    found[row, node] = max(0.0, law[drawn, tuple(path[:n])])
                    number[row, node] = index_of(tuple(path[:n]), vocab)
        return Stops(found, lambda node_B: left[number.gather(1, node_B.unsqueeze(1)).squeeze(1)])

    return rule


def index_of(word: Word, vocab: int) -> int:
    number = 0
    for token in word:
        number = vocab * number + 1 + token
    return number


def owed_after(draft: Table, target: Table, paths: int, length: int) -> Table:
    """The target of the rest of the block, q (1 - min(1, p/q))^K of joint laws normalised, after every prefix of fewer
    than L tokens; the target's own elsewhere."""
    table, vocab = target.clone(), target.shape[1]
    for level in range(length):
        rows = slice(start_of(level, vocab), start_of(level + 1, vocab))
        q, p = joint(target, level).unsqueeze(1) * target[rows], joint(draft, level).unsqueeze(1) * draft[rows]
        left = q * (1 - (p / q).clamp(max=1.0)) ** paths
        mass = left.sum(1, keepdim=True)
        table[rows] = torch.where(mass > 0, left / mass, target[rows])
    return table
