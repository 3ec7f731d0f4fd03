"""Ancestors, children and compaction of random trees, against loops."""

import random
from dataclasses import replace

import pytest
import torch

from eval.tree import DraftTree, compact, root_only
from tests.eval.trees import node_paths, random_paths, tree_of


def some_trees(seed: int) -> DraftTree:
    draw = random.Random(seed)
    return tree_of([random_paths(draw, 6, 4, 3) for _ in range(5)], [draw.randrange(6) for _ in range(5)])


@pytest.mark.parametrize("seed", range(12))
def test_ancestors(seed: int) -> None:
    tree = some_trees(seed)
    seen = tree.ancestors()
    for row in range(5):
        for node in range(tree.size):
            path, at = {node}, node
            while at:
                at = int(tree.parents[row, at])
                path.add(at)
            assert set(seen[row, node].nonzero().flatten().tolist()) == path | {0}
    depths = seen.sum(2) - 1
    for row in range(5):
        for node, words in enumerate(node_paths(tree, row)):
            if words is not None:
                assert int(depths[row, node]) == len(words)


@pytest.mark.parametrize("seed", range(12))
def test_children(seed: int) -> None:
    tree = some_trees(seed)
    for node in range(tree.size):
        for token in range(6):
            found, child = tree.children(torch.full((5,), node), torch.full((5,), token))
            for row in range(5):
                expected = [
                    n
                    for n in range(1, tree.size)
                    if tree.valid[row, n] and tree.parents[row, n] == node and tree.tokens[row, n] == token
                ]
                assert bool(found[row]) == bool(expected)
                if expected:
                    assert int(child[row]) == expected[0]


def test_the_root_is_nobodys_child() -> None:
    found, _ = root_only(torch.tensor([4, 5])).children(torch.tensor([0, 0]), torch.tensor([4, 5]))
    assert found.tolist() == [False, False]


@pytest.mark.parametrize("seed", range(12))
def test_compact_drops_padding_alone(seed: int) -> None:
    """Leaves of each row are struck out at random; what is left keeps its order, parents and scores."""
    tree, draw = some_trees(seed), random.Random(seed)
    valid = tree.valid.clone()
    for row in range(5):
        for node in reversed(range(1, tree.size)):
            inner = any(valid[row, n] and tree.parents[row, n] == node for n in range(1, tree.size))
            if not inner and draw.random() < 0.4:
                valid[row, node] = False
    sparse = replace(tree, valid=valid)
    dense = compact(sparse)
    assert dense.size == int(valid.sum(1).max()) and dense.depth == tree.depth
    for row in range(5):
        kept = [n for n in range(tree.size) if valid[row, n]]
        count = len(kept)
        assert dense.valid[row].tolist() == [True] * count + [False] * (dense.size - count)
        assert [p for p in node_paths(dense, row) if p is not None] == [node_paths(sparse, row)[n] for n in kept]
        assert torch.equal(dense.scores[row, :count], tree.scores[row, kept])
        assert all(int(dense.parents[row, n]) < max(n, 1) for n in range(count))


def test_root_only() -> None:
    tree = root_only(torch.tensor([7, 3]))
    assert tree.size == 1 and tree.depth == 0 and tree.tokens[:, 0].tolist() == [7, 3] and bool(tree.valid.all())
