"""Traversal verification, and the rule that this project adds to it: promoted traversal.

Both walk the tree of K paths leaf by leaf and delete what they reject; they differ in the order of siblings.
Target law q, draft law p, B rows, K paths, L drafted tokens, M inner nodes, V vocabulary.

What holds them together: a subtree is entered with a weight w, and its procedure accepts something in it with
probability w, what is accepted going on exactly as q does. At a node whose next child is drawn from a law c(x), given
all that has been seen there, the child x gets the weight min(1, w q(x) / c(x)); so with probability sum min(w q, c) a
child is accepted, and else the target that is still due is (w q - c)+, with S its mass the weight becomes S / (S + 1 -
w) and the law (w q - c)+ / S. When no child is left the node itself is accepted with its weight. Every order of
siblings is exact whose laws c are known.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eval.masses import masses, mix
from eval.rules_tree import along, on_nodes, repeated
from eval.verify import Drafts, Stops, mixed

SOLVE = 4  # steps for the share of promoted tokens; whatever they end on is exact
TINY = 1e-300
FLOOR = -1e4  # of logarithms: exp of it is 0, and sums of them stay finite


def traversal(drafts: Drafts) -> Stops:
    """Traversal verification (arXiv 2505.12398): siblings in the order in which the paths came by them."""
    if drafts.tokens.is_cuda:
        return by_kernels(drafts, promote=False)
    zeros = torch.zeros_like(drafts.target[:, : 1 + (drafts.length - 1) * drafts.paths, 0], dtype=torch.float64)
    return traverse(drafts, Promotion(zeros, zeros, zeros, torch.zeros_like(drafts.own)))


def promoted(drafts: Drafts) -> Stops:
    """Traversal that tries promoted tokens first.

    Each drafted token is promoted by a coin of its own, the likelier the higher q/p, and of the promoted siblings the
    first to come is the first tried. With m paths at a node, a(x) the chance that x is promoted and a its mean under p,
    the first child has the law p(x) (a(x) C + (1 - a(x)) c), C = (1 - (1 - a)^m) / a, c = (1 - a)^(m - 1). It is
    exactly q wherever c <= q/p <= C if a(x) = (q/p - c) / (C - c), which is the choice here.
    """
    if drafts.tokens.is_cuda:
        return by_kernels(drafts, promote=True)
    return traverse(drafts, promotion(drafts))


def by_kernels(drafts: Drafts, promote: bool) -> Stops:
    """The same two on a GPU."""
    from eval import kernels_tree

    laws, o = (drafts.target, drafts.draft), drafts.outline
    promo = kernels_tree.promote(*laws, o.counts, o.first, SOLVE) if promote else None
    return mixed(drafts, *kernels_tree.traverse(*laws, drafts.coins, (o.alike, o.counts, o.nodes, o.p, o.q), promo))


@dataclass(frozen=True)
class Promotion:
    """Which tokens are tried first. At an inner node p(x) a(x) = gain q(x) - cost p(x) between 0 and p(x), `mean` is
    its sum over x (all [B, M]); and the coins as they fell [B, K, L]."""

    gain: Tensor
    cost: Tensor
    mean: Tensor
    flags: Tensor

    @staticmethod
    def share(q: Tensor, p: Tensor, gain: Tensor, cost: Tensor) -> Tensor:
        """p(x) a(x)."""
        return (q * gain - p * cost).clamp(min=0.0).minimum(p)


def promotion(drafts: Drafts) -> Promotion:
    """Solve for the mean promotion of every node at which paths may part, and toss the coins."""
    paths = on_nodes(drafts, drafts.counts[..., :-1]).double()
    several = paths > 1

    def slope(mean_BM: Tensor) -> tuple[Tensor, Tensor]:
        high, low = multipliers(mean_BM, paths)
        gain = several / (high - low).clamp(min=1e-9)
        return gain, gain * low

    def promote(gain: Tensor, cost: Tensor) -> Tensor:
        zero = torch.zeros_like(gain)
        return masses(drafts.target, drafts.draft, mix(zero, zero, zero - 1, gain, cost)).clamp(max=1.0)

    # regula falsi; to halve the older end's value keeps it from creeping
    low, high, mean = torch.zeros_like(paths), torch.ones_like(paths), torch.full_like(paths, 1 / 3)
    low_value, high_value = torch.full_like(paths, 0.1), torch.full_like(paths, -0.1)
    for _ in range(SOLVE):
        value = promote(*slope(mean)) - mean
        more = value > 0
        low, low_value = torch.where(more, mean, low), torch.where(more, value, low_value / 2)
        high, high_value = torch.where(more, high, mean), torch.where(more, high_value / 2, value)
        mean = (high * low_value - low * high_value) / (low_value - high_value).clamp(min=TINY)
    gain, cost = slope(mean.clamp(0.0, 1.0))
    chance = Promotion.share(drafts.q, drafts.p, *(along(drafts, x) for x in (gain, cost))) / drafts.p
    return Promotion(gain, cost, promote(gain, cost), drafts.coins < chance)


def multipliers(mean: Tensor, paths: Tensor) -> tuple[Tensor, Tensor]:
    """What promotion and its lack multiply a token's chance to be first by: C and c."""
    return repeated(mean, paths), (1 - mean).pow((paths - 1).clamp(min=0))


def in_order(drafts: Drafts, flags: Tensor) -> Tensor:
    """The paths [B, K] as a depth-first walk comes by them: promoted siblings first, then by the first path there."""
    K = drafts.paths
    number = torch.arange(K, device=flags.device)
    key = number.view(1, -1, 1) + K * ~flags
    key = torch.where(drafts.alike[..., 1:], key.unsqueeze(1), 2 * K).amin(2)  # [B, K, L]: of the child on each path
    agree = drafts.alike[..., 1:].sum(3)
    mine = key.gather(2, agree.clamp(max=drafts.length - 1))
    before = torch.where(agree < drafts.length, mine < mine.transpose(1, 2), number.unsqueeze(1) < number)
    seat = before.sum(1)
    return torch.empty_like(seat).scatter_(1, seat, number.expand_as(seat))


# An inner node in the course of the walk: the weight it was entered with and the present one; what is gone of its
# target for promoted and for other tokens, as multiples of pa and p - pa; the product of what rejections left over; the
# draft's mass still to come, promoted and other; and the law of its present child, as multiples of pa and p - pa.
ENTERED, WEIGHT, GONE_UP, GONE, FACTOR, LEFT_UP, LEFT, NEXT_UP, NEXT = range(9)


@dataclass(frozen=True)
class Walk:
    """The drafts in the order of the walk: nodes [B, K, L + 1]; of each drafted token q, the promoted and the other
    part of p, and whether it is a promoted child (all [B, K, L]); how many tokens a path shares with the one before
    [B, K]; and the nodes as they are first come by [B, K, L, 9], weights left open, with the log ratios to their
    children."""

    nodes: Tensor
    q: Tensor
    up: Tensor
    rest: Tensor
    flagged: Tensor
    shared: Tensor
    fresh: Tensor
    log_ratio: Tensor


def line_up(drafts: Drafts, promo: Promotion) -> Walk:
    order = in_order(drafts, promo.flags)

    def sort(x: Tensor) -> Tensor:
        return x.gather(1, order.unsqueeze(2).expand(-1, -1, x.shape[2]))

    up = Promotion.share(drafts.q, drafts.p, along(drafts, promo.gain), along(drafts, promo.cost))
    mean, (high, low) = along(drafts, promo.mean), multipliers(along(drafts, promo.mean), drafts.counts[..., :-1])
    ratio = drafts.q / (up * high + (drafts.p - up) * low).clamp(min=TINY)
    flagged = (drafts.alike[..., 1:] & promo.flags.unsqueeze(1)).any(2)
    nodes, zero = sort(drafts.nodes), torch.zeros_like(mean)
    before = torch.cat([torch.full_like(nodes[:, :1, 1:], -1), nodes[:, :-1, 1:]], 1)
    fresh = torch.stack([sort(x) for x in (zero, zero, zero, zero, zero + 1, mean, 1 - mean, high, low)], 3)
    return Walk(
        nodes,
        sort(drafts.q),
        sort(up),
        sort(drafts.p - up),
        sort(flagged),
        (nodes[..., 1:] == before).sum(2),
        fresh,
        sort(ratio.log().clamp(min=FLOOR)),
    )


def traverse(drafts: Drafts, promo: Promotion) -> Stops:
    """The walk, path after path: where one leaves the path before it, its token is the next sibling there."""
    walk = line_up(drafts, promo)
    depth = torch.arange(drafts.length + 1, device=walk.nodes.device)
    fork = torch.full_like(walk.shared[:, :1], -1)
    weights = capped_from(walk.log_ratio[:, 0], fork, torch.ones_like(walk.q[:, 0, :1]))
    states, leaves = [entering(walk.fresh[:, 0], weights)], [weights[:, -1]]
    for k in range(1, drafts.paths):
        fork, state = walk.shared[:, k : k + 1], states[-1]
        cell, weight = next_sibling(drafts, promo, walk, state, k)
        weights = capped_from(walk.log_ratio[:, k], fork, weight)
        below = torch.where((depth[:-1] > fork).unsqueeze(2), entering(walk.fresh[:, k], weights), cell.unsqueeze(1))
        states.append(torch.where((depth[:-1] < fork).unsqueeze(2), state, below))
        leaves.append(torch.where(fork[:, 0] < drafts.length, weights[:, -1], leaves[-1]))
    return ends(drafts, promo, walk, torch.stack(states, 1), torch.stack(leaves, 1))


def entering(fresh_BLC: Tensor, weights_BD: Tensor) -> Tensor:
    """The nodes of a path as they are entered."""
    weight = weights_BD[:, :-1].unsqueeze(2)
    return torch.cat([weight, weight, fresh_BLC[..., GONE_UP:]], 2)


def capped_from(log_ratio_BL: Tensor, fork_B1: Tensor, weight_B1: Tensor) -> Tensor:
    """Weights [B, L + 1] along a path that has `weight` after its (fork + 1)-th token, each at most 1; meaningless
    before that."""
    total = torch.nn.functional.pad(log_ratio_BL.cumsum(1), (1, 0))
    depth = torch.arange(total.shape[1], device=total.device)
    start = total - weight_B1.log().clamp(min=FLOOR)
    caps = torch.where(depth > fork_B1 + 1, total, torch.where(depth == fork_B1 + 1, start, total.shape[1] * FLOOR))
    return (total - caps.cummax(1).values).clamp(max=0.0).exp()


def next_sibling(drafts: Drafts, promo: Promotion, walk: Walk, state_BLC: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The node where path k leaves the path before it, after the rejection of that one's child [B, 9], and the weight
    of path k's [B, 1]."""
    at = walk.shared[:, k : k + 1].clamp(max=drafts.length - 1)
    node = walk.nodes[:, k].gather(1, at)
    entered, weight, gone_up, gone, factor, left_up, left, next_up, following = state_BLC.gather(
        1, at.unsqueeze(2).expand(-1, 1, 9)
    ).unbind(2)
    gone_up, gone = gone_up + factor * next_up, gone + factor * following
    left_up, left = left_up - walk.up[:, k - 1].gather(1, at), left - walk.rest[:, k - 1].gather(1, at)
    gain, cost = promo.gain.gather(1, node), promo.cost.gather(1, node)
    due = masses(drafts.target, drafts.draft, mix(entered, gone, gone_up - gone, gain, cost), node) / factor
    rejected = (due + 1 - weight).clamp(min=TINY)
    factor = (factor * rejected).clamp(min=TINY)
    flagged = walk.flagged[:, k].gather(1, at)
    next_up = flagged / left_up.clamp(min=TINY)
    following = ~flagged / left.clamp(min=TINY)
    q, up, rest = (x[:, k].gather(1, at) for x in (walk.q, walk.up, walk.rest))
    child = (entered * q - gone_up * up - gone * rest).clamp(min=0.0) / factor
    child = (child / (next_up * up + following * rest).clamp(min=TINY)).clamp(max=1.0)
    cell = [entered, due / rejected, gone_up, gone, factor, left_up, left, next_up, following]
    return torch.cat(cell, 1), child


def ends(drafts: Drafts, promo: Promotion, walk: Walk, state_BKLC: Tensor, leaves_BK: Tensor) -> Stops:
    """Every node's chance to be the last, by the walk's order: its own weight, once all its children are rejected, if
    nothing before it was accepted."""
    B, K, L = walk.q.shape
    depth = torch.arange(L + 1, device=walk.nodes.device)
    last = torch.cat([depth > walk.shared[:, 1:].unsqueeze(2), torch.ones_like(walk.nodes[:, :1]).bool()], 1)
    entered, weight, gone_up, gone, factor, _, _, next_up, following = state_BKLC.unbind(3)
    final = torch.stack([entered, weight, gone_up + factor * next_up, gone + factor * following, factor], 3)
    M = promo.mean.shape[1]
    place = torch.where(last[..., :-1], walk.nodes[..., :-1], M).flatten(1)
    nodes = final.new_zeros(B, M + 1, 5).scatter(1, place.unsqueeze(2).expand(-1, -1, 5), final.flatten(1, 2))[:, :M]
    entered, weight, gone_up, gone, factor = nodes.unbind(2)
    table = mix(entered, gone, gone_up - gone, promo.gain, promo.cost)
    due = masses(drafts.target, drafts.draft, table) / factor
    weight = (due / (due + 1 - weight).clamp(min=TINY)).clamp(max=1.0)
    accept = torch.cat([weight.gather(1, walk.nodes[..., :-1].flatten(1)).view(B, K, L), leaves_BK.unsqueeze(2)], 2)
    accept = torch.where(depth == 0, 1.0, accept) * last
    accept = accept.flip(2).flatten(1)  # children before their parent
    before = torch.nn.functional.pad((1 - accept).cumprod(1)[:, :-1], (1, 0), value=1.0)
    law = torch.zeros_like(drafts.target[..., 0], dtype=torch.float64)
    law = law.scatter_add(1, walk.nodes.flip(2).flatten(1), accept * before)

    return mixed(drafts, law, with_leaves(table, K))


def with_leaves(mix_BMC: Tensor, paths: int) -> Tensor:
    """After a leaf the target's own law follows."""
    leaves = torch.zeros_like(mix_BMC[:, :1]).repeat(1, paths, 1)
    leaves[..., 0] = 1.0
    return torch.cat([mix_BMC, leaves], 1)
