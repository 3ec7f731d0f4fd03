"""Rules that judge K paths as one tree: EAGLE's, SpecTr's K-sequential selection.

Target law q, draft law p, B rows, K paths, L drafted tokens, N nodes, M inner ones, V vocabulary.
"""

import torch
from torch import Tensor

from eval.masses import masses, mix
from eval.verify import Drafts, Stops, mixed

SOLVE = 6  # bisection steps for SpecTr's factor; whatever they end on is exact, and more of them accept a little more


def tree(drafts: Drafts) -> Stops:
    """EAGLE's rule for proposals that were fixed before the target draws (SafeAILab/EAGLE): at a node try the children
    in turn, accept x with q(x), else set q(x) to 0 and renormalise; what is left yields the token that follows.

    All in all child x is entered with q(x), and the token that follows is none of the children.
    """
    share = drafts.alike[..., :-1].transpose(1, 2) & drafts.own.unsqueeze(2)  # [B, K', K, L]: K' names a child there
    entered = (share * drafts.q.unsqueeze(2)).sum(1)
    reached = torch.cat([torch.ones_like(drafts.q[..., :1]), drafts.q.cumprod(2)], 2)
    ends = reached * torch.cat([(1 - entered).clamp(min=0.0), torch.ones_like(entered[..., :1])], 2)

    def after(node_B: Tensor) -> Tensor:
        depth, path = drafts.place(node_B)
        row = drafts.target_row(node_B)
        at = depth.clamp(max=drafts.length - 1).view(-1, 1, 1)
        children = drafts.tokens.gather(2, at.expand(-1, drafts.paths, 1)).squeeze(2)
        named = share.gather(2, path.view(-1, 1, 1, 1).expand(-1, drafts.paths, 1, drafts.length)).squeeze(2)
        named = named.gather(2, at.expand(-1, drafts.paths, 1)).squeeze(2) & (depth < drafts.length).unsqueeze(1)
        return row.scatter_add(1, children, -row.gather(1, children) * named)

    return Stops(drafts.law(ends[:, 0, 0], ends[..., 1:]), after)


def k_sequential(drafts: Drafts) -> Stops:
    """SpecTr's K-sequential selection (Sun et al. 2023, arXiv 2310.15141), at every node anew on the paths that are
    left: accept the first token with uniform < q / (rho p), else draw from q - kappa min(q / rho, p).

    With m paths at a node, beta = sum min(q / rho, p) and kappa = (1 - (1 - beta)^m) / beta, any rho >= kappa is exact;
    the least such rho accepts most.
    """
    paths = on_nodes(drafts, drafts.counts[..., :-1]).clamp(min=1).double()
    rho, factor = solved(drafts, paths)

    accept = (drafts.q / (along(drafts, rho) * drafts.p)).clamp(max=1.0)
    fails = torch.where(drafts.alike[..., :-1], (1 - accept).unsqueeze(1), 1.0)  # [B, K, K', L]
    earlier = torch.ones(drafts.paths, drafts.paths, dtype=torch.bool, device=accept.device).tril(-1)
    first = accept * torch.where(earlier.unsqueeze(2), fails, 1.0).prod(2)
    entered = (drafts.alike[..., 1:] * first.unsqueeze(1)).sum(2)
    reached = torch.cat([torch.ones_like(entered[..., :1]), entered.cumprod(2)], 2)
    ends = reached * torch.cat([fails.prod(2), torch.ones_like(entered[..., :1])], 2)

    leaves = torch.zeros_like(drafts.target[:, rho.shape[1] :, 0], dtype=torch.float64)
    ones, inner = torch.ones_like(leaves), torch.ones_like(rho)
    whole = [torch.cat(x, 1) for x in ((inner, ones), (0 * rho, leaves), (factor, leaves), (1 / rho, leaves))]
    return mixed(drafts, drafts.law(ends[:, 0, 0], ends[..., 1:]), mix(*whole, torch.zeros_like(whole[0])))


def solved(drafts: Drafts, paths_BM: Tensor) -> tuple[Tensor, Tensor]:
    """rho and kappa(rho) of every inner node [B, M]. The interval is halved at least: what kappa is found to be bounds
    rho, too, since it grows with it and never leaves the side of the root that it starts from."""

    if drafts.tokens.is_cuda:
        from eval import kernels_tree

        return kernels_tree.select(drafts.target, drafts.draft, drafts.counts, drafts.first, SOLVE)

    def kappa(rho_BM: Tensor) -> Tensor:
        zero = torch.zeros_like(rho_BM)
        beta = masses(drafts.target, drafts.draft, mix(zero, zero, zero - 1, 1 / rho_BM, zero))
        return repeated(beta.clamp(max=1.0), paths_BM)

    low, rho = torch.ones_like(paths_BM), paths_BM
    for _ in range(SOLVE):
        middle = (low + rho) / 2
        found = kappa(middle)
        low, rho = torch.where(found > middle, found, low), torch.where(found > middle, rho, found)
    return rho, kappa(rho)


def on_nodes(drafts: Drafts, values_BKL: Tensor) -> Tensor:
    """Values at the inner nodes along the paths, by node [B, M]; 0 where no node is."""
    named = (values_BKL[..., 1:] * drafts.own[..., :-1]).transpose(1, 2).flatten(1)
    return torch.cat([values_BKL[:, 0, :1], named], 1)


def along(drafts: Drafts, values_BM: Tensor) -> Tensor:
    """Values of inner nodes along the paths [B, K, L]."""
    return values_BM.gather(1, drafts.nodes[..., :-1].flatten(1)).view(drafts.tokens.shape)


def repeated(chance: Tensor, times: Tensor) -> Tensor:
    """(1 - (1 - chance)^times) / chance, which is `times` at 0."""
    small = chance.clamp(min=1e-14)
    return -torch.expm1(times * torch.log1p(-small)) / small
