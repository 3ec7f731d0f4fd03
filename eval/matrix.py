"""Graft's retrieval (arXiv 2605.20104, 1.5-1.9): a successor matrix, stage templates, and the merge into a draft tree.

V vocabulary, R template nodes, K draft nodes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from eval.filling import Filling
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
    """Row t holds the target's latest top-8 guesses for what follows token t; -1 where nothing was seen yet. `filling`
    is what `graft` has found out about it: whether it pays to retrieve."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        # one row more than the vocabulary: writes that lose a tie land there
        self.rows = torch.full((vocab_size + 1, WIDTH), -1, dtype=torch.int64, device=device)
        self.owner = torch.full((vocab_size + 1,), -1, dtype=torch.int64, device=device)
        self.filling = Filling()

    def copy(self) -> "SuccessorMatrix":
        other = SuccessorMatrix(len(self.rows) - 1, self.rows.device)
        other.assign(self)
        return other

    def assign(self, other: "SuccessorMatrix | None") -> None:
        """Hold what another one holds; nothing, without one."""
        self.filling = Filling() if other is None else other.filling
        if other is None:
            self.rows.fill_(-1)
        else:
            self.rows.copy_(other.rows)

    @property
    def filled(self) -> int:
        return int((self.rows[:-1, 0] >= 0).sum())

    def update(self, tokens_n: Tensor, successors_nW: Tensor, teaches_n: Tensor | None = None) -> None:
        """Overwrite the rows of `tokens` (of those that teach, where that is given); of equal tokens the last in order
        wins, on every device."""
        spare = len(self.rows) - 1
        tokens_n = tokens_n if teaches_n is None else torch.where(teaches_n, tokens_n, spare)
        order = torch.arange(len(tokens_n), device=tokens_n.device)
        self.owner.scatter_reduce_(0, tokens_n, order, "amax")
        won = self.owner[tokens_n] == order
        self.rows[torch.where(won, tokens_n, spare)] = successors_nW
        self.owner.index_fill_(0, tokens_n, -1)
        self.rows[spare] = -1


@dataclass(frozen=True)
class Level:
    """The template's nodes of one depth: the index of each one's parent (0 the root, else 1 + place in `paths`), and
    its rank among the successors of the token there."""

    parents: Tensor
    ranks: Tensor


@dataclass(frozen=True)
class Template:
    """Rank paths as a static tree, in order of depth."""

    paths: tuple[tuple[int, ...], ...]
    levels: tuple[Level, ...]

    @property
    def flat(self) -> tuple[Tensor, Tensor]:
        """Parents and ranks of all nodes [R]."""
        return torch.cat([level.parents for level in self.levels]), torch.cat([level.ranks for level in self.levels])


def template(size: int, published: bool = True, device: torch.device | str = "cpu") -> Template:
    """The `size` best rank paths: by the published histogram where there is one and it is wanted, else the most
    probable ones. Templates of either kind are nested in one another, not across kinds."""
    if published and size in HISTOGRAMS:
        levels = _by_histogram(HISTOGRAMS[size])
    else:
        levels = by_weight(_candidates(size))[:size]
    paths = tuple(sorted(levels, key=lambda p: (len(p), p)))
    index = {p: 1 + i for i, p in enumerate(paths)}
    stacked = []
    for _, nodes in groupby(paths, key=len):
        pairs = [(index.get(path[:-1], 0), path[-1]) for path in nodes]
        parents, ranks = torch.tensor(pairs, device=device).unbind(1)
        stacked.append(Level(parents, ranks))
    return Template(paths, tuple(stacked))


def by_weight(paths: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The most probable first; a path's prefixes come before it."""
    return sorted(paths, key=lambda p: (-_weight(p), len(p), p))


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
    """Tokens of the template's nodes below each root [B, R], a level at a time; -1 for a cold row and all below it."""
    found = roots_B.unsqueeze(1)
    for level in shape.levels:
        above = found[:, level.parents]
        token = matrix.rows[above.clamp(min=0), level.ranks]
        found = torch.cat([found, torch.where(above >= 0, token, -1)], 1)
    return found[:, 1:]


def graft(tree: DraftTree, retrieved_BR: Tensor, wanted_BR: Tensor, shape: Template) -> tuple[DraftTree, Tensor]:
    """Hang retrieved nodes under the root of a draft tree, as a trie keyed by (parent, token): a node that the draft
    already has is merged with it and its descendants move there. Returns the tree and each row's merged count [B]."""
    B, K = tree.tokens.shape
    index = torch.arange(K, K + retrieved_BR.shape[1], device=retrieved_BR.device)
    # of each template node, the root in front: its place in the joined tree, and whether it is in it, merged or new
    place = retrieved_BR.new_zeros(B, 1)
    usable, merged = torch.ones_like(place, dtype=torch.bool), torch.zeros_like(place, dtype=torch.bool)
    parents = place
    for level in shape.levels:
        nodes = slice(place.shape[1] - 1, place.shape[1] - 1 + len(level.ranks))
        above, token = place[:, level.parents], retrieved_BR[:, nodes]
        alive = wanted_BR[:, nodes] & (token >= 0) & usable[:, level.parents]
        match = (tree.parents.unsqueeze(1) == above.unsqueeze(2)) & (tree.tokens.unsqueeze(1) == token.unsqueeze(2))
        match = match & tree.valid.unsqueeze(1)
        match[:, :, 0] = False
        found = match.any(2)
        parents = torch.cat([parents, above], 1)
        place = torch.cat(
            [place, torch.where(found, match.to(torch.uint8).argmax(2), index[nodes].expand_as(found))], 1
        )
        usable, merged = torch.cat([usable, alive], 1), torch.cat([merged, found & alive], 1)
    new = usable[:, 1:] & ~merged[:, 1:]
    joined = DraftTree(
        torch.cat([tree.tokens, retrieved_BR.clamp(min=0)], 1),
        torch.cat([tree.parents, parents[:, 1:]], 1),
        torch.cat([tree.scores, tree.scores.new_full(new.shape, -1e9)], 1),
        torch.cat([tree.source, torch.full_like(retrieved_BR, RETRIEVAL)], 1),
        torch.cat([tree.valid, new], 1),
        max(tree.depth, len(shape.levels)),
    )
    return joined, merged.sum(1)


def hang(tree: DraftTree, line_BL: Tensor, lengths_B: Tensor) -> tuple[DraftTree, Tensor]:
    """`graft` of a single line, the first `lengths` tokens of each row."""
    K = tree.size
    at, merged = torch.zeros_like(lengths_B), torch.zeros_like(lengths_B)
    for depth in range(min(tree.depth, line_BL.shape[1])):
        found, child = tree.children(at, line_BL[:, depth])
        found = found & (merged == depth) & (depth < lengths_B)
        at, merged = torch.where(found, child, at), merged + found
    place = torch.arange(line_BL.shape[1], device=line_BL.device).expand_as(line_BL)
    first = place == merged.unsqueeze(1)
    joined = DraftTree(
        torch.cat([tree.tokens, line_BL], 1),
        torch.cat([tree.parents, torch.where(first, at.unsqueeze(1), K + place - 1)], 1),
        torch.cat([tree.scores, tree.scores.new_full(line_BL.shape, -1e9)], 1),
        torch.cat([tree.source, torch.full_like(line_BL, RETRIEVAL)], 1),
        torch.cat([tree.valid, (place >= merged.unsqueeze(1)) & (place < lengths_B.unsqueeze(1))], 1),
        max(tree.depth, line_BL.shape[1]),
    )
    return joined, merged
