"""A draft tree: what a drafter proposes and a verifier walks.

B rows, N nodes (the root, index 0, is the last committed token), M candidates. Parents come before children.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

DRAFTER, RETRIEVAL = 0, 1  # where a node came from
FIELDS = ("tokens", "parents", "scores", "source", "valid")  # a tree's tensors


@dataclass(frozen=True)
class DraftTree:
    """tokens, parents (the root is its own), cumulative log-probabilities, source and validity of each node [B, N];
    `depth` bounds every node's depth. Invalid nodes are padding: no path includes them."""

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    source: Tensor
    valid: Tensor
    depth: int

    @property
    def size(self) -> int:
        return self.tokens.shape[1]

    def ancestors(self) -> Tensor:
        """[B, N, N] bool: `ancestors[b, n, m]` = m lies on the path from the root to n, n included."""
        B, N = self.parents.shape
        own = torch.eye(N, dtype=torch.bool, device=self.parents.device).expand(B, N, N)
        index = self.parents.unsqueeze(2).expand(B, N, N)
        seen = own
        for _ in range(self.depth):
            seen = seen.gather(1, index) | own
        return seen

    def outline(self) -> tuple[Tensor, Tensor]:
        """The ancestors, and each node's depth [B, N]."""
        if self.parents.is_cuda:
            from models import fused_trees

            return fused_trees.ancestors(self.parents, self.depth)
        seen = self.ancestors()
        return seen, seen.sum(2) - 1

    def children(self, node_B: Tensor, token_B: Tensor) -> tuple[Tensor, Tensor]:
        """Is there a child of `node` that says `token`, and which -> (bool [B], index [B])."""
        match = (self.parents == node_B.unsqueeze(1)) & (self.tokens == token_B.unsqueeze(1)) & self.valid
        match[:, 0] = False
        return match.any(1), match.to(torch.uint8).argmax(1)


def root_only(tokens_B: Tensor) -> DraftTree:
    """Plain decoding: nothing drafted."""
    tokens = tokens_B.unsqueeze(1)
    zeros = torch.zeros_like(tokens)
    return DraftTree(tokens, zeros, zeros.float(), zeros, torch.ones_like(tokens, dtype=torch.bool), 0)


def merged(roots_B: Tensor, tokens_BKL: Tensor) -> DraftTree:
    """K paths as one tree of 1 + K * L nodes, numbered as in eval.verify.Drafts; a path whose first tokens are those of
    an earlier one uses its nodes, and its own are invalid."""
    K, L = tokens_BKL.shape[1:]
    alike = (tokens_BKL.unsqueeze(2) == tokens_BKL.unsqueeze(1)).cumprod(3)
    first = alike.to(torch.uint8).argmax(2)
    path = torch.arange(K, device=tokens_BKL.device)
    above = first[..., :-1] + 1 + K * torch.arange(L - 1, device=path.device)
    parents = torch.cat([torch.zeros_like(first[..., :1]), above], 2).transpose(1, 2).flatten(1)
    root = torch.zeros_like(roots_B).unsqueeze(1)
    own = (first == path.view(1, K, 1)).transpose(1, 2).flatten(1)
    tokens = torch.cat([roots_B.unsqueeze(1), tokens_BKL.transpose(1, 2).flatten(1)], 1)
    valid = torch.cat([torch.ones_like(root, dtype=torch.bool), own], 1)
    parents, scores = torch.cat([root, parents], 1), torch.zeros(tokens.shape, device=path.device)
    return DraftTree(tokens, parents, scores, torch.full_like(tokens, DRAFTER), valid, L)


def compact(tree: DraftTree, width: int | None = None) -> DraftTree:
    """Valid nodes first, in order, and no more columns than `width`, or than the fullest row needs."""
    order = (~tree.valid).to(torch.uint8).sort(dim=1, stable=True).indices
    place = torch.empty_like(order).scatter_(1, order, torch.arange(tree.size, device=order.device).expand_as(order))
    order = order[:, : int(tree.valid.sum(1).max()) if width is None else width]
    valid = tree.valid.gather(1, order)
    parents = place.gather(1, tree.parents.gather(1, order)) * valid
    return DraftTree(
        tree.tokens.gather(1, order),
        parents,
        tree.scores.gather(1, order),
        tree.source.gather(1, order),
        valid,
        tree.depth,
    )
