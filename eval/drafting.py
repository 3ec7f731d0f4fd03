"""How an EAGLE-3 drafter proposes: chains, EAGLE's dynamic tree, and Graft's gates on it.

B rows, k branch (children a node, frontier nodes a level), M candidates, U uncommitted drafter slots, H hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eval.tree import DRAFTER, DraftTree
from models.cache import KVCache
from models.eagle3 import Eagle3
from models.target import Target

GATE_DEPTHS = (1, 2, 6)  # Graft checks the best path's probability after these draft depths (d0, d1, d5)
GATE_SHARES = (8, 24, 40)  # of 60 nodes, those kept for drafts when that gate stops drafting
UNGATED = len(GATE_DEPTHS)


@dataclass(frozen=True)
class Candidates:
    """All drafted nodes, layer by layer [B, M]: parents are 1 + candidate index, 0 the root; a score of -inf is a node
    that its row's gate had already stopped. `stage` [B] is the gate that stopped the row, UNGATED if none."""

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    stage: Tensor
    depth: int  # layers drafted


class EagleDrafting:
    """An EAGLE-3 drafter beside the committed text: its cache, and the state it drafts from."""

    def __init__(self, drafter: Eagle3, target: Target, rows: int, capacity: int) -> None:
        self.drafter, self.target, self.vocab = drafter, target, drafter.vocab.to(target.device)
        self.cache: KVCache = drafter.new_cache(rows, capacity)
        self.state_B1H: Tensor = torch.empty(0)

    @torch.no_grad()
    def extend(self, taps_BTC: Tensor, next_ids_BT: Tensor, counts_B: Tensor, counts: list[int]) -> None:
        """Commit slots: the target's taps at each, and the token that came after. Rows use their first `counts`."""
        drafter, dtype = self.drafter, self.drafter.fc.weight.dtype
        states = drafter.step(drafter.fuse(taps_BTC.to(dtype)), self.target.embed(next_ids_BT), self.cache)
        self.cache.keep(counts_B, counts)
        last = states.gather(1, (counts_B - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, states.shape[2]))
        # a row that committed nothing (it has finished) keeps its old state
        self.state_B1H = last if 0 not in counts else torch.where((counts_B > 0).view(-1, 1, 1), last, self.state_B1H)

    def _top(self, states_BkH: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and target tokens of each state's k best continuations [B, k', k]."""
        logits = self.drafter.logits(states_BkH).float()
        best = logits.topk(min(k, logits.shape[-1]), -1)
        return best.values - logits.logsumexp(-1, keepdim=True), self.vocab.to_target(best.indices)

    @torch.no_grad()
    def candidates(self, depth: int, branch: int, gates: tuple[float, ...] = ()) -> Candidates:
        """Draft `depth` layers (EAGLE-2/3: the best `branch` of each are expanded), stopping early at the gates."""
        B, k = len(self.state_B1H), branch
        logp, token = self._top(self.state_B1H, k)
        scores, tokens = logp[:, 0], token[:, 0]
        k = scores.shape[1]
        layers = [(tokens, torch.zeros_like(tokens), scores)]
        frontier, states = torch.arange(k, device=tokens.device).expand(B, k), self.state_B1H.expand(B, k, -1)
        own = torch.eye(k, dtype=torch.bool, device=tokens.device).expand(B, k, k)
        ancestors = own
        stage = torch.full((B,), UNGATED, device=tokens.device)
        drafted = total = 0
        for level in range(1, depth + 1):
            drafted, total = level, total + layers[-1][0].shape[1]
            if self._gated(level, gates, layers[-1][2], stage) or level == depth:
                break
            states = self.drafter.step(states, self.target.embed(tokens), self.cache, level - 1, ancestors)
            logp, grown = self._top(states, k)
            running = (stage == UNGATED).view(B, 1, 1)
            grown_scores = (scores.unsqueeze(2) + logp).masked_fill(~running, float("-inf")).flatten(1)
            layers.append((grown.flatten(1), (frontier + 1).unsqueeze(2).expand_as(grown).flatten(1), grown_scores))
            picked = grown_scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
            above = picked // grown.shape[2]
            scores, tokens = grown_scores.gather(1, picked), grown.flatten(1).gather(1, picked)
            frontier = picked + total
            states = states.gather(1, above.unsqueeze(2).expand(-1, -1, states.shape[2]))
            ancestors = ancestors.gather(1, above.unsqueeze(2).expand(-1, -1, ancestors.shape[2]))
            ancestors = torch.cat([ancestors, own], 2)
        joined = [torch.cat(part, 1) for part in zip(*layers, strict=True)]
        return Candidates(joined[0], joined[1], joined[2], stage, drafted)

    @staticmethod
    def _gated(level: int, gates: tuple[float, ...], scores_Bn: Tensor, stage_B: Tensor) -> bool:
        """Apply the gate of this level, if there is one, to rows still drafting; True when no row drafts on."""
        if level not in GATE_DEPTHS or not gates:
            return False
        index = GATE_DEPTHS.index(level)
        confidence = scores_Bn.amax(1).exp()  # c_d: the probability of the single best drafted path
        stopped = (stage_B == UNGATED) & (confidence <= gates[index])
        stage_B.masked_fill_(stopped, index)
        return not bool((stage_B == UNGATED).any())


def draft_budgets(nodes: int) -> list[int]:
    """Draft nodes kept at each stage, the last without a gate: round(nodes x {8, 24, 40} / 60), nodes."""
    return [round(nodes * share / 60) for share in GATE_SHARES] + [nodes]


def rerank(candidates: Candidates, roots_B: Tensor, budget_B: Tensor, nodes: int) -> DraftTree:
    """The best candidates by cumulative score, `budget` of each row, as a tree (EAGLE-2's rerank).

    A child never outscores its parent and ties go to the earlier node, so what is kept is closed under parents.
    """
    B, M = candidates.tokens.shape
    keep = min(nodes, M)
    ranked = candidates.scores.sort(dim=1, descending=True, stable=True)
    within = torch.arange(keep, device=roots_B.device) < budget_B.unsqueeze(1)
    usable = within & (ranked.values[:, :keep] > float("-inf"))
    chosen = (
        torch.where(usable, ranked.indices[:, :keep], M).sort(1).values
    )  # back in drafting order, dropped ones last
    valid = chosen < M
    index = chosen.clamp(max=M - 1)
    place = torch.zeros(B, M + 2, dtype=torch.int64, device=roots_B.device)  # candidate (1 + index) -> node
    place.scatter_(
        1, torch.where(valid, index + 1, M + 1), torch.arange(1, keep + 1, device=roots_B.device).expand(B, keep)
    )
    parents = place.gather(1, candidates.parents.gather(1, index)) * valid
    root, tokens = torch.zeros_like(roots_B).unsqueeze(1), candidates.tokens.gather(1, index)
    scores = candidates.scores.gather(1, index).masked_fill(~valid, -1e9)
    return DraftTree(
        torch.cat([roots_B.unsqueeze(1), tokens], 1),
        torch.cat([root, parents], 1),
        torch.cat([root.to(scores.dtype), scores], 1),
        torch.full((B, keep + 1), DRAFTER, device=roots_B.device),
        torch.cat([torch.ones_like(root, dtype=torch.bool), valid], 1),
        candidates.depth,
    )
