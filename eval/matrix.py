"""Graft's retrieval (arXiv 2605.20104, 1.5-1.9): a successor matrix, stage templates, and the merge into a draft tree.

V vocabulary, R template nodes, K draft nodes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eval.tree import RETRIEVAL, DraftTree

WIDTH = 8  # successors a token
RANK_WEIGHTS = (
    0.50,
    0.17,
    0.09,
    0.06,
    0.045,
    0.035,
    0.03,
    0.025,
)  # chance that rank r is right; our weights, which meet Table 7
HISTOGRAMS = {  # published nodes a depth, by template size, for 60 nodes (Table 7)
    52: (8, 10, 8, 6, 5, 4, 4, 4, 3),
    36: (6, 7, 5, 4, 4, 3, 3, 2, 2),
    20: (4, 3, 3, 2, 2, 2, 2, 1, 1),
}
MAX_DEPTH = 9


class SuccessorMatrix:
    """Row t holds the target's latest top-8 guesses for what follows token t; -1 where nothing was seen yet."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        # one row more than the vocabulary: writes that lose a tie land there
        self.rows = torch.full((vocab_size + 1, WIDTH), -1, dtype=torch.int64, device=device)
        self._owner = torch.full((vocab_size + 1,), -1, dtype=torch.int64, device=device)

    def copy(self) -> "SuccessorMatrix":
        other = SuccessorMatrix(len(self.rows) - 1, self.rows.device)
        other.rows.copy_(self.rows)
        return other

    @property
    def filled(self) -> int:
        return int((self.rows[:-1, 0] >= 0).sum())

    def update(self, tokens_n: Tensor, successors_nW: Tensor) -> None:
        """Overwrite the rows of `tokens`; of equal tokens the last in order wins, on every device."""
        order = torch.arange(len(tokens_n), device=tokens_n.device)
        self._owner.scatter_reduce_(0, tokens_n, order, "amax")
        won = self._owner[tokens_n] == order
        self.rows[torch.where(won, tokens_n, len(self.rows) - 1)] = successors_nW
        self._owner[tokens_n] = -1
        self.rows[-1] = -1


@dataclass(frozen=True)
class Template:
    """Rank paths as a static tree, level by level: parent (its index, -1 = root), rank and depth of each node."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]


def template(size: int, published: bool = True) -> Template:
    """The `size` best rank paths: by the published histogram where there is one and it is wanted, else the most
    probable ones. Templates of either kind are nested in one another, not across kinds."""
    if published and size in HISTOGRAMS:
        levels = _by_histogram(HISTOGRAMS[size])
    else:
        levels = sorted(_candidates(size), key=lambda p: (-_weight(p), len(p), p))[:size]
    paths = tuple(sorted(levels, key=lambda p: (len(p), p)))
    index = {p: i for i, p in enumerate(paths)}
    parents = tuple(index[p[:-1]] if len(p) > 1 else -1 for p in paths)
    return Template(parents, tuple(p[-1] for p in paths), tuple(len(p) for p in paths), paths)


def _weight(path: tuple[int, ...]) -> float:
    weight = 1.0
    for rank in path:
        weight *= RANK_WEIGHTS[rank]
    return weight


def _by_histogram(counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    chosen: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for count in counts:
        extensions = [(*p, r) for p in level for r in range(WIDTH)]
        level = sorted(extensions, key=lambda p: (-_weight(p), p))[:count]
        chosen += level
    return chosen


def _candidates(size: int) -> list[tuple[int, ...]]:
    """Enough paths to hold the `size` most probable ones: a path's prefixes are never less probable than it."""
    found: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for _ in range(min(MAX_DEPTH, size)):
        extensions = [(*p, r) for p in level for r in range(WIDTH)]
        level = sorted(extensions, key=lambda p: (-_weight(p), p))[:size]
        found += level
    return found


def retrieve(matrix: SuccessorMatrix, roots_B: Tensor, shape: Template) -> Tensor:
    """Tokens of the template's nodes below each root [B, R]; -1 for a cold row and all below it."""
    columns: list[Tensor] = []
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        above = roots_B if parent < 0 else columns[parent]
        token = matrix.rows[above.clamp(min=0), rank]
        columns.append(torch.where(above >= 0, token, -1))
    return torch.stack(columns, 1)


def graft(tree: DraftTree, retrieved_BR: Tensor, wanted_BR: Tensor, shape: Template) -> tuple[DraftTree, Tensor]:
    """Hang retrieved nodes under the root of a draft tree, as a trie keyed by (parent, token): a node that the draft
    already has is merged with it and its descendants move there. Returns the tree and each row's merged count [B]."""
    K = tree.size
    places: list[Tensor] = []  # node index of each template node in the joined tree
    usable: list[Tensor] = []  # it is in the joined tree, merged or new
    merged: list[Tensor] = []
    root = torch.zeros_like(tree.tokens[:, 0])
    for i, parent in enumerate(shape.parents):
        above = root if parent < 0 else places[parent]
        alive = wanted_BR[:, i] & (retrieved_BR[:, i] >= 0)
        alive = alive if parent < 0 else alive & usable[parent]
        found, child = tree.children(above, retrieved_BR[:, i])
        places.append(torch.where(found, child, K + i))
        usable.append(alive)
        merged.append(found & alive)
    parents = [root if p < 0 else places[p] for p in shape.parents]
    is_merged = torch.stack(merged, 1)
    new = torch.stack(usable, 1) & ~is_merged
    joined = DraftTree(
        torch.cat([tree.tokens, retrieved_BR.clamp(min=0)], 1),
        torch.cat([tree.parents, torch.stack(parents, 1)], 1),
        torch.cat([tree.scores, tree.scores.new_full(new.shape, -1e9)], 1),
        torch.cat([tree.source, torch.full_like(retrieved_BR, RETRIEVAL)], 1),
        torch.cat([tree.valid, new], 1),
        max(tree.depth, max(shape.depths, default=0)),
    )
    return joined, is_merged.sum(1)
