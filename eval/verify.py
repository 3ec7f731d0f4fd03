"""Acceptance: the target's own draw at each node decides which child, if any, is entered.

With drafts fixed before the target draws, this is EAGLE's tree rule for deterministic proposals (accept child x with
probability p(x), else zero it and renormalise) in law: both sample p exactly and enter the child that was sampled.
At T = 0 the draw is the arg-max and the accepted path the longest matching one.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from eval.tree import DraftTree

lossless = True


def walk(tree: DraftTree, choose: Callable[[Tensor, int], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Follow the target from the root: `choose(node [B], depth)` is its token at that node, drawn once a depth.

    Returns the path [B, depth + 1] of node indices (root first, padded with its last node), how many drafts were
    accepted [B], and the token after them, the bonus [B].
    """
    node = torch.zeros_like(tree.tokens[:, 0])
    path, accepted, bonus = [node], torch.zeros_like(node), torch.zeros_like(node)
    alive = torch.ones_like(node, dtype=torch.bool)
    for depth in range(tree.depth + 1):
        token = choose(node, depth)
        bonus = torch.where(alive, token, bonus)
        found, child = tree.children(node, token)
        alive = alive & found
        accepted = accepted + alive
        node = torch.where(alive, child, node)
        if depth < tree.depth:
            path.append(node)
    return torch.stack(path, 1), accepted, bonus


def follow(tree: DraftTree, chosen_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`walk` where the target's token after every node is known."""
    if chosen_BN.is_cuda:
        from models import fused_tokens

        return fused_tokens.walk(chosen_BN, tree.tokens, tree.parents, tree.valid, tree.depth)
    index = torch.arange(len(chosen_BN))
    return walk(tree, lambda node, _: chosen_BN[index, node])
