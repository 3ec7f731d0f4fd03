"""Acceptance: which drafted path the target keeps, and the token that follows it.

A fixed tree is walked: the target's own draw at each node decides which child, if any, is entered. With drafts fixed
before the target draws, this is EAGLE's tree rule for deterministic proposals (accept child x with probability p(x),
else zero it and renormalise) in law: both sample p exactly and enter the child that was sampled. At T = 0 the draw is
the arg-max and the accepted path the longest matching one.

Sampled drafts are judged by a rule (eval/rules.py): a pure function from `Drafts` to `Stops`, the law of where the
round ends and of the token that follows; `settle` draws from it. A rule has no randomness of its own, so enumerating
its stops is enumerating the rule.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from eval.masses import left
from eval.tree import DraftTree
from models.sampling import draw, draw_rows

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


def told(
    tree: DraftTree, walked: tuple[Tensor, Tensor, Tensor], depths_BN: Tensor | None, stage_B: Tensor, merged_B: Tensor
) -> tuple[Tensor, Tensor]:
    """What a walked path says [B, depth + 1] (drafts, then the bonus), and a round's numbers: accepted, verified nodes,
    gate stage, merged nodes, drafted depth, what was said, and who drafted each node of the path."""
    path, accepted, bonus = walked
    said = tree.tokens.gather(1, path)  # root, then accepted drafts
    said = torch.cat([said[:, 1:], bonus.unsqueeze(1)], 1).scatter(1, accepted.unsqueeze(1), bonus.unsqueeze(1))
    nodes = tree.valid.sum(1) - 1
    drafted = nodes if depths_BN is None else (depths_BN * tree.valid).amax(1)
    numbers = torch.stack([accepted, nodes, stage_B, merged_B, drafted], 1)
    return said, torch.cat([numbers, said, tree.source.gather(1, path)], 1)


def accept(
    tree: DraftTree, chosen_BN: Tensor, depths_BN: Tensor | None, stage_B: Tensor, merged_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Path, and what `told` makes of it, where the target's token after every node is known."""
    if chosen_BN.is_cuda:
        from models import fused_trees

        fields = tree.tokens, tree.parents, tree.source, tree.valid, depths_BN
        return fused_trees.accept(chosen_BN, *fields, stage_B, merged_B, tree.depth)
    index = torch.arange(len(chosen_BN))
    walked = walk(tree, lambda node, _: chosen_BN[index, node])
    return walked[0], *told(tree, walked, depths_BN, stage_B, merged_B)


@dataclass(frozen=True)
class Drafts:
    """K paths of L tokens, drawn independently from the drafter's law, with that law and the target's along them.

    Node 0 is the root and node 1 + d * K + k the token `tokens[:, k, d]`; paths that begin alike share the nodes of the
    first of them, and what lies in the others' places is never read.

    tokens: [B, K, L] int64.
    draft: [B, M, V], M >= 1 + (L - 1) * K: the law that the tokens after each inner node were drawn from.
    target: [B, N, V], N = 1 + L * K: the target's law after each node.
    coins: [B, K, L] uniforms, one for each drafted token, for rules that toss them.
    """

    tokens: Tensor
    draft: Tensor
    target: Tensor
    coins: Tensor

    @property
    def paths(self) -> int:
        return self.tokens.shape[1]

    @property
    def length(self) -> int:
        return self.tokens.shape[2]

    @cached_property
    def outline(self) -> "Outline":
        if self.tokens.is_cuda:
            from eval import kernels

            return Outline(*kernels.outline(self.tokens, self.draft, self.target))
        return outline(self)

    @property
    def alike(self) -> Tensor:
        """[B, K, K, L + 1] bool: two paths have the same first d tokens."""
        return self.outline.alike

    @property
    def first(self) -> Tensor:
        """[B, K, L + 1]: the first path with the same first d tokens."""
        return self.outline.first

    @property
    def counts(self) -> Tensor:
        """[B, K, L + 1]: how many paths have the same first d tokens."""
        return self.outline.counts

    @property
    def own(self) -> Tensor:
        """[B, K, L] bool: this path is the first to come by its (d + 1)-th token, and lends the node its number."""
        return self.outline.own

    @property
    def nodes(self) -> Tensor:
        """[B, K, L + 1]: the nodes along each path, root first."""
        return self.outline.nodes

    @property
    def p(self) -> Tensor:
        """The draft's probability of each drafted token [B, K, L], float64; without laws not to be read."""
        return self.outline.p

    @property
    def q(self) -> Tensor:
        """The target's probability of each drafted token [B, K, L], float64."""
        return self.outline.q

    def law(self, root_B: Tensor, values_BKL: Tensor) -> Tensor:
        """A law over nodes [B, N], given the root's probability and that of each path's nodes."""
        return torch.cat([root_B.unsqueeze(1), (values_BKL * self.own).transpose(1, 2).flatten(1)], 1)

    def at(self, node_B: Tensor, values_BKD: Tensor) -> Tensor:
        """The entry [B] of a node among values [B, K, L + 1] given along the paths."""
        depth, path = self.place(node_B)
        return values_BKD.flatten(1).gather(1, (path * (self.length + 1) + depth).unsqueeze(1)).squeeze(1)

    def place(self, node_B: Tensor) -> tuple[Tensor, Tensor]:
        """Depth and path of a node [B]."""
        depth = torch.div(node_B + self.paths - 1, self.paths, rounding_mode="floor")
        return depth, (node_B - 1).remainder(self.paths)

    def target_row(self, node_B: Tensor) -> Tensor:
        """The target's law after a node [B, V], float64."""
        index = node_B.view(-1, 1, 1).expand(-1, 1, self.target.shape[2])
        return self.target.gather(1, index).squeeze(1).double()

    def rows(self, node_B: Tensor) -> tuple[Tensor, Tensor]:
        """The target's and the draft's law after a node [B, V], float64; the draft has none after a leaf: zeros."""
        last = (self.length - 1) * self.paths
        index = node_B.clamp(max=last).view(-1, 1, 1).expand(-1, 1, self.target.shape[2])
        draft = self.draft.gather(1, index).squeeze(1).double()
        return self.target_row(node_B), torch.where((node_B <= last).unsqueeze(1), draft, 0.0)


@dataclass(frozen=True)
class Outline:
    """What `Drafts` says of its paths, under the names of its properties."""

    alike: Tensor
    first: Tensor
    counts: Tensor
    own: Tensor
    nodes: Tensor
    p: Tensor
    q: Tensor


def outline(drafts: Drafts) -> Outline:
    tokens, K = drafts.tokens, drafts.paths
    same = (tokens.unsqueeze(2) == tokens.unsqueeze(1)).cumprod(3).bool()
    alike = torch.cat([torch.ones_like(same[..., :1]), same], 3)
    first = alike.to(torch.uint8).argmax(2)
    offset = (torch.arange(drafts.length + 1, device=tokens.device) - 1) * K + 1
    nodes = (first + offset).clamp(min=0) * (offset > 0)
    own = first[..., 1:] == torch.arange(K, device=tokens.device).view(1, -1, 1)

    def along(laws_BNV: Tensor) -> Tensor:
        places = (nodes[..., :-1] * laws_BNV.shape[2] + tokens).flatten(1)
        return laws_BNV.flatten(1).gather(1, places).view_as(tokens).double()

    p = along(drafts.draft) if drafts.draft.shape[1] else torch.full(tokens.shape, torch.nan, dtype=torch.float64)
    return Outline(alike, first, alike.sum(2), own, nodes, p, along(drafts.target))


@dataclass(frozen=True)
class Stops:
    """Where a round ends: the law [B, N] over the last accepted node, and for one of them (node [B]) the law [B, V] of
    the token that follows it. Neither need be normalised. `mix` [B, N, C] is the same law after every node, where it
    is one that eval.masses can tell."""

    law: Tensor
    after: Callable[[Tensor], Tensor]
    mix: Tensor | None = None


def mixed(drafts: Drafts, law_BN: Tensor, mix_BNC: Tensor) -> Stops:
    def after(node_B: Tensor) -> Tensor:
        index = node_B.view(-1, 1, 1).expand(-1, 1, mix_BNC.shape[2])
        return left(*drafts.rows(node_B), mix_BNC.gather(1, index).squeeze(1))

    return Stops(law_BN, after, mix_BNC)


def settle(drafts: Drafts, stops: Stops, uniforms_B2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the end of the round: the path [B, L + 1] of nodes (root first, padded with its last node), the number of
    accepted drafts [B] and the token after them [B]."""
    end, following = uniforms_B2.unbind(1)
    if drafts.tokens.is_cuda:
        from eval import kernels

        node, depth, path = kernels.finish(stops.law, end, drafts.nodes)
        if stops.mix is not None:
            inner = 1 + (drafts.length - 1) * drafts.paths
            return path, depth, kernels.draw_left(drafts.target, drafts.draft, stops.mix, node, following, inner)
    else:
        node = draw(stops.law, end)
        depth, on = drafts.place(node)
        steps = torch.arange(drafts.length + 1, device=node.device).minimum(depth.unsqueeze(1))
        path = drafts.nodes.flatten(1).gather(1, on.unsqueeze(1) * (drafts.length + 1) + steps)
    law = stops.after(node)
    # where rounding chose an end that has no mass left to follow it, the target's own law is as near as any
    law = torch.where(law.sum(1, keepdim=True) > 0, law, drafts.target_row(node))
    return path, depth, draw_rows(law.unsqueeze(1), torch.zeros_like(node).unsqueeze(1), following.unsqueeze(1))[:, 0]
