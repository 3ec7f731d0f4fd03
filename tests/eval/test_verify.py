"""The acceptance rule by exact enumeration: every draw, its exact probability, the joint law of what comes out."""

import itertools
import random
from collections import defaultdict

import pytest
import torch
from torch import Tensor

from eval.verify import lossless, walk
from tests.eval.trees import Path, node_paths, random_paths, tree_of

VOCAB = 3
Joint = dict[Path, float]


class Law:
    """A target whose next-token law depends on the whole context: a Dirichlet(0.7) draw for each."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.known: dict[Path, list[float]] = {}

    def __call__(self, context: Path) -> list[float]:
        if context not in self.known:
            source = random.Random(f"{self.seed}:{context}")
            weights = [source.gammavariate(0.7, 1) for _ in range(VOCAB)]
            self.known[context] = [w / sum(weights) for w in weights]
        return self.known[context]


def joint(law: Law, length: int, start: Path = ()) -> Joint:
    """Exact law of `length` tokens after `start`, as plain decoding draws them."""
    found: Joint = {start: 1.0}
    for _ in range(length):
        found = {(*c, t): p * law(c)[t] for c, p in found.items() for t in range(VOCAB)}
    return found


def outcomes_of_walk(paths: list[Path], law: Law) -> Joint:
    """{accepted path + bonus: probability}: one batch row for every sequence of target draws."""
    depth = max((len(p) for p in paths), default=0)
    sequences = torch.tensor(list(itertools.product(range(VOCAB), repeat=depth + 1)))
    rows = len(sequences)
    tree = tree_of([paths] * rows, [0] * rows)
    contexts = node_paths(tree, 0)
    visited: list[Tensor] = []

    def choose(node_B: Tensor, at: int) -> Tensor:
        assert len(visited) == at, "one draw a depth, in order"
        visited.append(node_B)
        return sequences[:, at]

    path, accepted, bonus = walk(tree, choose)
    assert path.shape == (rows, depth + 1)
    found: defaultdict[Path, float] = defaultdict(float)
    for row in range(rows):
        count = int(accepted[row])
        said = tuple(tree.tokens[row, path[row, 1 : count + 1]].tolist())
        assert said == contexts[int(path[row, count])]
        probability = 1.0
        for at in range(count + 1):
            context = contexts[int(visited[at][row])]
            assert context is not None
            probability *= law(context)[int(sequences[row, at])]
        # draws after the walk has ended change nothing: each of their values is a row of its own
        found[(*said, int(bonus[row]))] += probability / VOCAB ** (depth - count)
    return dict(found)


def outcomes_of_eagle(paths: list[Path], law: Law) -> Joint:
    """EAGLE's rule: accept child x with p(x), else zero it and renormalise; what is left yields the bonus."""
    found: defaultdict[Path, float] = defaultdict(float)

    def visit(node: Path, probability: float) -> None:
        p, left = list(law(node)), probability
        for child in (path for path in paths if path[:-1] == node):
            accept = p[child[-1]]
            visit(child, left * accept)
            left *= 1 - accept
            p[child[-1]] = 0.0
            total = sum(p)
            if left < 1e-300 or total == 0:
                return
            p = [x / total for x in p]
        for token in range(VOCAB):
            if left * p[token]:
                found[(*node, token)] += left * p[token]

    visit((), 1.0)
    return dict(found)


def extended(outcomes: Joint, law: Law, length: int) -> Joint:
    found: defaultdict[Path, float] = defaultdict(float)
    for said, probability in outcomes.items():
        for whole, p in joint(law, length - len(said), said).items():
            found[whole] += probability * p
    return dict(found)


def distance(one: Joint, other: Joint) -> float:
    return sum(abs(one.get(k, 0.0) - other.get(k, 0.0)) for k in one.keys() | other.keys()) / 2


def cases() -> list[tuple[int, int]]:
    return [(seed, depth) for depth in (1, 2, 3) for seed in range(8)]


@pytest.mark.parametrize(("seed", "depth"), cases())
def test_the_output_law_is_the_targets(seed: int, depth: int) -> None:
    law, paths = Law(seed), random_paths(random.Random(seed), VOCAB, depth, 3)
    outcomes = outcomes_of_walk(paths, law)
    assert distance(extended(outcomes, law, depth + 1), joint(law, depth + 1)) < 1e-12
    assert lossless


@pytest.mark.parametrize(("seed", "depth"), cases())
def test_path_and_bonus_have_the_law_of_eagles_rule(seed: int, depth: int) -> None:
    law, paths = Law(seed), random_paths(random.Random(seed), VOCAB, depth, 3)
    assert distance(outcomes_of_walk(paths, law), outcomes_of_eagle(paths, law)) < 1e-12


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_full_trees_accept_everything(depth: int) -> None:
    law = Law(1)
    paths = [p for n in range(1, depth + 1) for p in itertools.product(range(VOCAB), repeat=n)]
    outcomes = outcomes_of_walk(paths, law)
    assert all(len(said) == depth + 1 for said in outcomes)
    assert distance(outcomes, joint(law, depth + 1)) < 1e-12


def test_rows_of_a_batch_walk_by_themselves() -> None:
    paths: list[list[Path]] = [[(1,), (1, 2), (0,)], [(2,)], []]
    tree = tree_of(paths, [0, 0, 0])
    draws = torch.tensor([[1, 2, 0], [2, 1, 1], [0, 0, 0]])
    path, accepted, bonus = walk(tree, lambda node, depth: draws[:, depth])
    assert accepted.tolist() == [2, 1, 0] and bonus.tolist() == [0, 1, 0]
    assert path[2].tolist() == [0, 0, 0] and path[1].tolist() == [0, 1, 1]


def test_padding_is_never_entered() -> None:
    tree = tree_of([[(1,)], [(1,), (2,), (0,)]], [0, 0])
    assert tree.size == 4  # row 0 is padded with nodes of token 0 under the root
    _, accepted, bonus = walk(tree, lambda node, depth: torch.zeros(2, dtype=torch.int64))
    assert accepted.tolist() == [0, 1] and bonus.tolist() == [0, 0]
