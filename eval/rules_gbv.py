"""SpecTr-GBV as its authors released it. It is not lossless: docs/verification.md shows by how much, and why.

Target law q, draft law p, B rows, K paths, L drafted tokens, M inner nodes, V vocabulary.
"""

import torch
from torch import Tensor

from eval.rules_tree import along, on_nodes
from eval.verify import Drafts, Stops


def spectr_gbv(drafts: Drafts) -> Stops:
    """SpecTr-GBV (arXiv 2604.25925), by the formulas of the released code.

    With phi(u) = 1 - (1 - u)^K and rho = min(1, p/q) of joint laws, the mass that is meant to be accepted at a prefix
    is G = q phi(rho), and D = phi(p) the chance that some draft begins so. A prefix passes with (G - G') / (D - G'), G'
    the sum of G over its continuations by one token, a full block with G / D. Drafts are tested in order and only where
    they are longer than the best prefix so far; a prefix that an earlier draft has shown is not tested again, a full
    block is, and ends the round when it passes. The token that follows is drawn from q (1 - rho^K).
    """
    K = drafts.paths
    log_q, log_p = drafts.q.log().cumsum(2), drafts.p.log().cumsum(2)
    odds = torch.cat([torch.ones_like(log_q[..., :1]), (log_p - log_q).clamp(max=700.0).exp()], 2)
    meant = log_q.exp() * some(odds[..., 1:].clamp(max=1.0), K)
    chance = some(log_p.exp().clamp(max=1.0), K)
    odds_BM = on_nodes(drafts, odds[..., :-1])
    onward = along(drafts, meant_onward(drafts, odds_BM))[..., 1:] * log_q[..., :-1].exp()
    inner = ((meant[..., :-1] - onward) / (chance[..., :-1] - onward)).nan_to_num(0.0).clamp(0.0, 1.0)
    passes = torch.cat([inner * drafts.own[..., :-1], (meant[..., -1:] / chance[..., -1:]).clamp(0.0, 1.0)], 2)
    return Stops(lottery(drafts, passes), lambda node_B: after(drafts, node_B, odds_BM))


def meant_onward(drafts: Drafts, odds_BM: Tensor) -> Tensor:
    """The sum of G over the continuations of each inner node by one token, as a share of its q [B, M]."""
    if drafts.tokens.is_cuda:
        from eval import kernels_tree

        return kernels_tree.meant_onward(drafts.target, drafts.draft, odds_BM, drafts.paths)
    M = odds_BM.shape[1]
    q = drafts.target[:, :M].double()
    share = (torch.minimum(q, drafts.draft[:, :M] * odds_BM.unsqueeze(2)) / q).nan_to_num(0.0)
    return (q * some(share, drafts.paths)).sum(2)


def some(u: Tensor, K: int) -> Tensor:
    """phi: the chance that one of K trials succeeds."""
    return -torch.expm1(K * torch.log1p(-u))


def lottery(drafts: Drafts, passes_BKL: Tensor) -> Tensor:
    """The law of the best prefix after all drafts [B, N], given the chance with which each draft's prefixes pass."""
    B, K, L = drafts.tokens.shape
    law = torch.zeros_like(drafts.target[..., 0], dtype=torch.float64)
    law[:, 0] = 1.0
    depth = drafts.place(torch.arange(law.shape[1], device=law.device))[0].expand(B, -1)
    for k in range(K):
        fails = 1 - passes_BKL[:, k]
        longer = torch.nn.functional.pad(
            fails.flip(1).cumprod(1).flip(1), (0, 1), value=1.0
        )  # none passes from here on
        shorter = law.new_zeros(B, L + 1).scatter_add(1, depth, law).cumsum(1)[:, :-1]
        found = passes_BKL[:, k] * longer[:, 1:] * shorter
        law = (law * longer.gather(1, depth)).scatter_add(1, drafts.nodes[:, k, 1:], found)
    return law


def after(drafts: Drafts, node_B: Tensor, odds_BM: Tensor) -> Tensor:
    q, p = drafts.rows(node_B)
    odds = torch.nn.functional.pad(odds_BM, (0, 1)).gather(1, node_B.unsqueeze(1).clamp(max=odds_BM.shape[1]))
    rho = (torch.minimum(q, p * odds) / q).nan_to_num(0.0)
    return q * (1 - rho.pow(drafts.paths))
