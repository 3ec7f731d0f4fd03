"""Retrieval: the published templates, the matrix's updates, and the trie merge against a slow dict."""

import itertools
import random

import pytest
import torch

from eval.drafting import draft_budgets
from eval.matrix import HISTOGRAMS, WIDTH, SuccessorMatrix, graft, hang, retrieve, template
from eval.tree import DRAFTER, RETRIEVAL, compact
from tests.eval.trees import Path, node_paths, path_set, random_paths, tree_of

VOCAB = 12


@pytest.mark.parametrize("size", sorted(HISTOGRAMS))
def test_published_histograms(size: int) -> None:
    shape = template(size)
    assert len(shape.paths) == size == sum(HISTOGRAMS[size])
    assert tuple(len(level.ranks) for level in shape.levels) == HISTOGRAMS[size]


def test_the_worked_example() -> None:
    """The smallest stage template, path by path."""
    levels = [[p for p in template(20).paths if len(p) == d] for d in range(1, 10)]
    assert levels[0] == [(0,), (1,), (2,), (3,)]
    assert levels[1] == [(0, 0), (0, 1), (1, 0)]
    assert levels[2] == [(0, 0, 0), (0, 0, 1), (0, 1, 0)]
    for depth in range(4, 8):
        assert levels[depth - 1] == [(0,) * depth, (*(0,) * (depth - 1), 1)]
    assert levels[7] == [(0,) * 8] and levels[8] == [(0,) * 9]


def test_published_templates_are_nested() -> None:
    d5, d1, d0 = (set(template(size).paths) for size in (20, 36, 52))
    assert d5 < d1 < d0


@pytest.mark.parametrize("size", [1, 2, 5, 9, 17, 20, 36, 52, 60, 100])
def test_templates_are_trees(size: int) -> None:
    shape = template(size)
    assert len(set(shape.paths)) == size
    parents = [int(i) for level in shape.levels for i in level.parents]
    ranks = [int(i) for level in shape.levels for i in level.ranks]
    sizes = [len(level.ranks) for level in shape.levels]
    assert sizes == [sum(len(path) == depth for path in shape.paths) for depth in range(1, len(sizes) + 1)]
    for i, path in enumerate(shape.paths):
        assert len(path) <= 9 and ranks[i] == path[-1] < WIDTH
        assert parents[i] <= i
        assert shape.paths[parents[i] - 1] == path[:-1] if len(path) > 1 else parents[i] == 0


@pytest.mark.parametrize("nodes", range(1, 61))
def test_stages_fill_the_budget(nodes: int) -> None:
    budgets = draft_budgets(nodes)
    assert budgets == sorted(budgets) and budgets[-1] == nodes
    assert budgets[:3] == [round(nodes * share / 60) for share in (8, 24, 40)]
    assert len(template(nodes - budgets[0]).paths) == nodes - budgets[0]


def test_update_overwrites_and_the_last_of_equal_tokens_wins() -> None:
    matrix = SuccessorMatrix(VOCAB)
    rows = torch.arange(4 * WIDTH).view(4, WIDTH)
    matrix.update(torch.tensor([3, 5, 3, 7]), rows)
    assert torch.equal(matrix.rows[3], rows[2]) and torch.equal(matrix.rows[5], rows[1])
    assert matrix.filled == 3
    matrix.update(torch.tensor([7, 7]), rows[:2])
    assert torch.equal(matrix.rows[7], rows[1]) and torch.equal(matrix.rows[3], rows[2])
    assert (matrix.rows[-1] == -1).all() and matrix.filled == 3


def test_updates_equal_a_loop_over_many_ties() -> None:
    source = torch.Generator().manual_seed(0)
    matrix, expected = SuccessorMatrix(VOCAB), torch.full((VOCAB, WIDTH), -1)
    for _ in range(5):
        tokens = torch.randint(VOCAB, (40,), generator=source)
        successors = torch.randint(VOCAB, (40, WIDTH), generator=source)
        matrix.update(tokens, successors)
        for token, row in zip(tokens.tolist(), successors, strict=True):
            expected[token] = row
        assert torch.equal(matrix.rows[:-1], expected)


def test_a_copy_is_its_own() -> None:
    matrix = SuccessorMatrix(VOCAB)
    other = matrix.copy()
    other.update(torch.tensor([1]), torch.zeros(1, WIDTH, dtype=torch.int64))
    assert matrix.filled == 0 and other.filled == 1


def random_matrix(seed: int, cold: float) -> SuccessorMatrix:
    """Rows of distinct successors, as a top-8 gives them; some never seen."""
    draw, matrix = random.Random(seed), SuccessorMatrix(VOCAB)
    warm = [t for t in range(VOCAB) if draw.random() >= cold]
    if warm:
        matrix.update(torch.tensor(warm), torch.tensor([draw.sample(range(VOCAB), WIDTH) for _ in warm]))
    return matrix


def follow(matrix: SuccessorMatrix, root: int, ranks: Path) -> Path | None:
    """Tokens along a rank path, None once a row is cold."""
    token, said = root, []
    for rank in ranks:
        token = int(matrix.rows[token, rank])
        if token < 0:
            return None
        said.append(token)
    return tuple(said)


@pytest.mark.parametrize("seed", range(10))
def test_cold_rows_drop_their_subtree(seed: int) -> None:
    matrix, shape = random_matrix(seed, 0.4), template(52)
    roots = torch.arange(VOCAB)
    tokens = retrieve(matrix, roots, shape)
    for row in range(VOCAB):
        for i, ranks in enumerate(shape.paths):
            said = follow(matrix, row, ranks)
            assert int(tokens[row, i]) == (-1 if said is None else said[-1])


@pytest.mark.parametrize("seed", range(20))
def test_the_merge_is_a_union_of_tries(seed: int) -> None:
    draw = random.Random(seed)
    rows, shape = 6, template(draw.choice([5, 20, 36, 52]))
    matrix = random_matrix(seed, draw.choice([0.0, 0.3, 1.0]))
    drafted = [random_paths(draw, VOCAB, 4, 3) for _ in range(rows)]
    roots = [draw.randrange(VOCAB) for _ in range(rows)]
    # each row wants a random prefix-closed part of the template, one row nothing
    wanted: list[set[Path]] = [set() for _ in range(rows)]
    for row, ranks in itertools.product(range(rows - 1), shape.paths):
        if (len(ranks) == 1 or ranks[:-1] in wanted[row]) and draw.random() < 0.8:
            wanted[row].add(ranks)
    tree = tree_of(drafted, roots)
    mask = torch.tensor([[ranks in wanted[row] for ranks in shape.paths] for row in range(rows)])
    joined, merged = graft(tree, retrieve(matrix, torch.tensor(roots), shape), mask, shape)
    for found in (joined, compact(joined)):
        assert found.tokens[:, 0].tolist() == roots
        for row in range(rows):
            said = {follow(matrix, roots[row], ranks) for ranks in wanted[row]} - {None}
            both = said & set(drafted[row])
            assert path_set(found, row) == set(drafted[row]) | said
            assert int(merged[row]) == len(both)
            for node, path in enumerate(node_paths(found, row)):
                if path:
                    # what the draft already had stays the draft's, and its retrieved descendants hang under it
                    expected = DRAFTER if path in set(drafted[row]) else RETRIEVAL
                    assert int(found.source[row, node]) == expected
            assert all(int(found.parents[row, n]) < n for n in range(1, found.size) if found.valid[row, n])
        assert found.depth >= max(len(p) for row in range(rows) for p in path_set(found, row) | {()})


def test_retrieved_nodes_score_below_all_drafts() -> None:
    tree = tree_of([[(1,), (2,)]], [0])
    shape = template(5)
    mask = torch.ones(1, 5, dtype=torch.bool)
    joined, _ = graft(tree, retrieve(random_matrix(1, 0.0), torch.tensor([0]), shape), mask, shape)
    assert float(joined.scores[0, joined.source[0] == RETRIEVAL].max()) < float(tree.scores.min())


@pytest.mark.parametrize("seed", range(20))
def test_a_line_hangs_in_the_trie(seed: int) -> None:
    """Rows whose line follows the tree for none, some or all of its way, and further; short ones and none at all."""
    draw = random.Random(seed)
    drafts = [random_paths(draw, 5, draw.randint(1, 4), 3)[: draw.randint(1, 12)] for _ in range(8)]
    drafts = [sorted({path[:n] for path in row for n in range(1, 1 + len(path))}) for row in drafts]
    tree, lengths = tree_of(drafts, [1] * 8), [draw.randint(0, 7) for _ in range(8)]
    lines = [([*draw.choice([*row, ()])] + [draw.randrange(5) for _ in range(7)])[:7] for row in drafts]
    joined, merged = hang(tree, torch.tensor(lines), torch.tensor(lengths))
    assert (joined.parents[:, 1:] < torch.arange(1, joined.size)).all()
    for row, (draft, line, length) in enumerate(zip(drafts, lines, lengths, strict=True)):
        copied = {tuple(line[:n]) for n in range(1, 1 + length)}
        assert path_set(joined, row) == set(draft) | copied
        assert int(merged[row]) == len(copied & set(draft))
        assert int((joined.source[row] == RETRIEVAL)[joined.valid[row]].sum()) == len(copied - set(draft))
    assert joined.depth >= max(map(len, path_set(joined, 0)), default=0)
