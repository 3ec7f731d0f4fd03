"""Rules that judge one drafted path: token, block and greedy block verification, and multi-path block verification.

Target law q, draft law p, x the drafted path, B rows, K paths, L drafted tokens, V vocabulary. All of them stop at the
longest prefix that passes, and the token that follows has the law (scale q - minus p)+ of the last accepted node.
Ratios along a path are logarithms; sums over the vocabulary, and everything made of them, are float64.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eval.masses import masses, mix
from eval.verify import Drafts, Stops, mixed

HUGE = 700.0  # exp of it is finite; beyond such a ratio nothing of what is subtracted is left


def token(drafts: Drafts) -> Stops:
    """Token verification (Leviathan et al. 2023, Chen et al. 2023): accept x with min(1, q/p), one token after another;
    on rejection draw from (q - p)+, after the last one from q."""
    accept = (drafts.q[:, 0] / drafts.p[:, 0]).clamp(max=1.0)
    one = torch.ones_like(accept[:, :1])
    law = torch.cat([one, accept.cumprod(1)], 1) * torch.cat([1 - accept, one], 1)
    ones = torch.ones_like(law)
    return mixed(drafts, law, mix(ones, ones))


def block(drafts: Drafts) -> Stops:
    """Block verification (Sun et al. 2024, arXiv 2403.10444): accept the longest prefix that its weight allows.

    The weight of a prefix is r_i = min(1, r_{i-1} q/p), what is left of the target there A_i = sum (r_i q - p)+; the
    prefix passes with A_i / (A_i + 1 - r_i), the whole block with r_L.
    """
    weight = capped(log_ratios(drafts))
    table = mix(weight, torch.ones_like(weight))
    return mixed(drafts, longest(weight, excess(drafts, table)), table)


def greedy_block(drafts: Drafts) -> Stops:
    """Greedy block verification (the same paper): block verification whose weights are not capped.

    It accepts the most that one path can in one round, and is exact only if the target is changed for the next
    L - stop - 1 tokens after this round's: `changed` and `owed`.
    """
    scale, minus = split(joint(log_ratios(drafts)))
    table = mix(scale, minus)
    return mixed(drafts, longest(scale, excess(drafts, table)), table)


@dataclass(frozen=True)
class Carry:
    """What greedy block verification owes to earlier rounds: J of them, the oldest first.

    For `left` [B, J] more tokens the target is (R q - p)+ normalised, where q is the target that the round itself
    verified against and R (`log_ratio` [B, J]) the ratio of the joint laws q/p of all tokens since it began. The draft
    laws p must be those that the round's own draft would have gone on with, which holds where the drafter's law is a
    function of the text alone.
    """

    log_ratio: Tensor
    left: Tensor

    @staticmethod
    def none(drafts: Drafts) -> "Carry":
        """Nothing is owed. At most L - 1 rounds ever are: each emits a token at least."""
        zeros = drafts.tokens.new_zeros(drafts.tokens.shape[0], max(drafts.length - 1, 1))
        return Carry(zeros.double(), zeros)


def changed(drafts: Drafts, carry: Carry) -> tuple[Drafts, list[tuple[Drafts, Tensor]]]:
    """The drafts with the target that is owed instead of the target. Beside it, for each round that is owed something,
    the drafts with the target that it verified against, and its log ratio [B, L + 1] along the path."""
    rounds, steps = [], torch.arange(drafts.length + 1, device=drafts.tokens.device)
    draft = drafts.draft[:, : drafts.length].double()
    draft = torch.cat([draft, torch.zeros_like(draft[:, :1])], 1)
    for j in range(carry.left.shape[1]):
        log = carry.log_ratio[:, j : j + 1] + joint(log_ratios(drafts))
        rounds.append((drafts, log))
        scale, minus = split(log)
        target = (drafts.target * scale.unsqueeze(2) - draft * minus.unsqueeze(2)).clamp(min=0.0)
        mass = target.sum(2, keepdim=True)
        holds = (steps < carry.left[:, j : j + 1]).unsqueeze(2) & (mass > 0)
        drafts = replace(drafts, target=torch.where(holds, target / mass, drafts.target))
    return drafts, rounds


def owed(drafts: Drafts, carry: Carry, accepted_B: Tensor, token_B: Tensor) -> Carry:
    """What is owed after a round of greedy block verification on these drafts: `accepted` of them, then `token`."""
    now, rounds = changed(drafts, carry)
    place, token = accepted_B.unsqueeze(1), token_B.unsqueeze(1)
    ratios = []
    for before, log in [*rounds, (now, joint(log_ratios(now)))]:
        q, p = before.rows(accepted_B)
        ratios.append(log.gather(1, place) + q.gather(1, token).log() - p.gather(1, token).log())
    left = torch.cat([carry.left, torch.full_like(place, drafts.length)], 1) - place - 1
    return Carry(torch.cat(ratios, 1)[:, 1:].nan_to_num(0.0, HUGE, -HUGE), left.clamp(min=0)[:, 1:])


def multipath(drafts: Drafts) -> Stops:
    """Greedy multi-path block verification (arXiv 2602.16961): block verification of the best of K paths.

    At each node tokens are ranked by q/p, the last by token id; the path that is lexicographically highest is kept, and
    the draft law becomes the law of the kept path. With x the draft's mass of a prefix and A that of the prefixes of
    its length that rank below it, it is kept with (A + x)^K - A^K; A and x are carried as shares of A + x.
    """
    bits = (drafts.length * len(drafts.tokens)).bit_length() if drafts.tokens.is_cuda else 0
    path = highest(drafts, bits)
    node = drafts.nodes.gather(1, path.view(-1, 1, 1).expand(-1, 1, drafts.length + 1)).squeeze(1)
    pick = path.view(-1, 1, 1).expand(-1, 1, drafts.length)
    token, q, p = (x.gather(1, pick).squeeze(1) for x in (drafts.tokens, drafts.q, drafts.p))
    index = node[:, :-1].unsqueeze(2).expand(-1, -1, drafts.target.shape[2])
    ratio = drafts.target.gather(1, index) / drafts.draft.gather(1, index)
    if drafts.tokens.is_cuda:
        from eval import kernels_rank

        rows = torch.arange(ratio.shape[0] * ratio.shape[1], dtype=torch.int32, device=ratio.device) << (31 - bits)
        order = (ranked(ratio, bits) | rows.view(*ratio.shape[:2], 1)).flatten().sort(stable=True).indices
        laws = (drafts.target, drafts.draft)
        kept, weight, left = kernels_rank.kept_law(*laws, node[:, :-1], token, p, q, order, drafts.paths)
    else:
        kept, weight, left = kept_law(drafts, index, token, q, ratio)
    law = torch.zeros_like(drafts.target[..., 0], dtype=torch.float64).scatter(1, node, longest(weight, left))

    def after(node_B: Tensor) -> Tensor:
        depth = drafts.place(node_B)[0].unsqueeze(1)
        row = depth.clamp(max=drafts.length - 1).unsqueeze(2).expand(-1, 1, kept.shape[2])
        minus = kept.gather(1, row).squeeze(1) * (depth < drafts.length)
        return (drafts.target_row(node_B) * weight.gather(1, depth) - minus).clamp(min=0.0)

    return Stops(law, after)


def kept_law(
    drafts: Drafts, index_BLV: Tensor, token_BL: Tensor, q_BL: Tensor, ratio_BLV: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The law of the kept path's tokens [B, L, V], the weights of its prefixes [B, L + 1], and what is left of the
    target beside it at each [B, L]. Where p = 0 a token's rank does not matter: it is not drawn there."""
    K, order = drafts.paths, ratio_BLV.sort(dim=2, stable=True).indices
    q, p = (laws.gather(1, index_BLV).gather(2, order).double() for laws in (drafts.target, drafts.draft))
    upto = p.cumsum(2)
    seat = (order == token_BL.unsqueeze(2)).to(torch.uint8).argmax(2, keepdim=True)
    p_path, below = p.gather(2, seat).squeeze(2), (upto - p).gather(2, seat).squeeze(2)
    mass = torch.cat([torch.ones_like(p_path[:, :1]), p_path.cumprod(1)[:, :-1]], 1)
    under = (mass * below).cumsum(1) - mass * below  # A: a prefix ranks below if its last tokens do
    whole = (under + mass).clamp(min=1e-300)
    under, mass = (under / whole).unsqueeze(2), (mass / whole).unsqueeze(2)
    chances = powers(under + mass * upto, under + mass * (upto - p), K) / powers(torch.ones_like(under), under, K)
    kept = p * chances
    weight = capped(q_BL.log() - kept.gather(2, seat).squeeze(2).log())
    left = (q * weight[:, :-1].unsqueeze(2) - kept).clamp_(min=0.0).sum(2)
    return torch.empty_like(kept).scatter_(2, order, kept), weight, left


def ranked(ratio: Tensor, bits: int) -> Tensor:
    """What tokens are ranked by: the ratio or, where its place is to be shared with `bits` of something else, the first
    of its bits, since every order is exact that does not look at what was drawn. Fits into 31 - bits."""
    return ratio.float().view(torch.int32) >> bits if bits else ratio


def highest(drafts: Drafts, bits: int) -> Tensor:
    """The path [B] whose tokens rank highest, by q/p and then by id, the first difference deciding."""
    ratio = drafts.q.to(drafts.target.dtype) / drafts.p.to(drafts.target.dtype)  # to the bit what the sort sees
    rank = ranked(ratio, bits)
    agree = drafts.alike[..., 1:].sum(3)
    at = agree.clamp(max=drafts.length - 1)
    mine, other = rank.gather(2, at), rank.gather(2, at).transpose(1, 2)
    mine_id, other_id = drafts.tokens.gather(2, at), drafts.tokens.gather(2, at).transpose(1, 2)
    beaten = (other > mine) | ((other == mine) & (other_id > mine_id))
    return (~(beaten & (agree < drafts.length)).any(2)).to(torch.uint8).argmax(1)


def powers(high: Tensor, low: Tensor, K: int) -> Tensor:
    """(high^K - low^K) / (high - low), without the difference: the sum of high^i low^(K-1-i)."""
    total, power = torch.ones_like(high), low
    for _ in range(K - 1):
        total = torch.addcmul(power.expand_as(total), total, high)
        power = power * low
    return total


def log_ratios(drafts: Drafts) -> Tensor:
    """log q/p of the drafted tokens of the first path [B, L]."""
    return drafts.q[:, 0].log() - drafts.p[:, 0].log()


def joint(logs_BL: Tensor) -> Tensor:
    """Log ratio of every prefix, the empty one first [B, L + 1]."""
    return torch.nn.functional.pad(logs_BL.cumsum(1), (1, 0))


def capped(logs_BL: Tensor) -> Tensor:
    """r_0 = 1, r_i = min(1, r_{i-1} times the ratio): [B, L + 1]."""
    total = joint(logs_BL)
    return (total - total.cummax(1).values).exp()


def split(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """(scale, minus), the larger of them 1, whose quotient is the ratio."""
    return log_ratio.clamp(max=0.0).exp(), (-log_ratio.clamp(min=0.0)).exp()


def excess(drafts: Drafts, mix_BDC: Tensor) -> Tensor:
    """What is left of the target at each inner node of a single path [B, L]."""
    return masses(drafts.target, drafts.draft, mix_BDC[:, :-1])


def longest(weight_BD: Tensor, left_BL: Tensor) -> Tensor:
    """The law of the longest prefix that passes [B, L + 1]."""
    inner = weight_BD[:, :-1]
    passes = torch.where(inner < 1, left_BL / (left_BL + 1 - inner), 1.0)
    passes = torch.cat([passes, weight_BD[:, -1:]], 1)
    fails = torch.cat([1 - passes[:, 1:], torch.ones_like(passes[:, :1])], 1)
    return passes * fails.flip(1).cumprod(1).flip(1)
