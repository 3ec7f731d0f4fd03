"""Random draft trees, and paths through them by plain loops."""

import random

import torch

from eval.tree import DraftTree

Path = tuple[int, ...]  # the tokens below the root


def tree_of(rows: list[list[Path]], roots: list[int]) -> DraftTree:
    """A batch of trees from the paths of their nodes, every prefix included; short rows are padded."""
    width = 1 + max(len(paths) for paths in rows)
    tokens, parents = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    valid = torch.zeros(len(rows), width, dtype=torch.bool)
    for b, paths in enumerate(rows):
        place: dict[Path, int] = {(): 0}
        tokens[b, 0], valid[b, 0] = roots[b], True
        for path in sorted(paths, key=len):
            node = place[path] = len(place)
            tokens[b, node], parents[b, node], valid[b, node] = path[-1], place[path[:-1]], True
    depth = max((len(p) for paths in rows for p in paths), default=0)
    scores = torch.randn(len(rows), width)
    return DraftTree(tokens, parents, scores, torch.zeros_like(tokens), valid, depth)


def random_paths(draw: random.Random, vocab: int, depth: int, branching: int) -> list[Path]:
    found: list[Path] = []
    level: list[Path] = [()]
    for _ in range(depth):
        level = [(*p, t) for p in level for t in draw.sample(range(vocab), draw.randint(0, min(branching, vocab)))]
        draw.shuffle(level)
        found += level
    return found


def node_paths(tree: DraftTree, row: int) -> list[Path | None]:
    """The path of each node, None where it is padding."""
    found: list[Path | None] = []
    for node in range(tree.size):
        if not tree.valid[row, node]:
            found.append(None)
            continue
        path: list[int] = []
        while node:
            path.insert(0, int(tree.tokens[row, node]))
            node = int(tree.parents[row, node])
        found.append(tuple(path))
    return found


def path_set(tree: DraftTree, row: int) -> set[Path]:
    """All drafted paths of a row; fails when a (parent, token) pair comes twice."""
    paths = [p for p in node_paths(tree, row) if p]
    assert len(set(paths)) == len(paths), "a child twice"
    return set(paths)
