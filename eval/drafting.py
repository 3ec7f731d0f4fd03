"""How an EAGLE-3 drafter proposes: chains, EAGLE's dynamic tree, and Graft's gates on it.

B rows, k branch (children a node, frontier nodes a level), M candidates, U uncommitted drafter slots, H hidden.
"""

import copy
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from eval.tree import DRAFTER, DraftTree
from models.cache import KVCache
from models.capture import Steps
from models.eagle3 import Eagle3
from models.kernels import kernels
from models.sampling import top
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


@dataclass(frozen=True)
class Frontier:
    """A draft after `level` layers: (tokens, parents, scores) of each, and the k best nodes of the last, which the next
    layer expands: their tokens, scores and candidate indices [B, k], states [B, k, H] and ancestors [B, k, U]."""

    layers: tuple[tuple[Tensor, Tensor, Tensor], ...]
    tokens: Tensor
    scores: Tensor
    index: Tensor
    states: Tensor
    ancestors: Tensor
    stage: Tensor
    level: int

    @property
    def drafted(self) -> int:
        """Candidates so far, a row."""
        return sum(tokens.shape[1] for tokens, _, _ in self.layers)

    def grown(
        self, layer: tuple[Tensor, Tensor, Tensor], best: tuple[Tensor, Tensor, Tensor, Tensor], states: Tensor
    ) -> "Frontier":
        """One layer more. `best` are the nodes to expand next [B, W]: their tokens, scores, candidate indices, and
        which node of this frontier, whose `states` these are, each hangs on."""
        tokens, scores, index, above = best
        B, W = tokens.shape
        own = torch.eye(W, dtype=self.ancestors.dtype, device=tokens.device).expand(B, W, W)
        ancestors = self.ancestors.gather(1, above.unsqueeze(2).expand(-1, -1, self.ancestors.shape[2]))
        return Frontier(
            layers=(*self.layers, layer),
            tokens=tokens,
            scores=scores,
            index=index,
            states=states.gather(1, above.unsqueeze(2).expand(-1, -1, states.shape[2])),
            ancestors=torch.cat([ancestors, own], 2),
            stage=self.stage,
            level=self.level + 1,
        )

    def gated(self, gate: int, threshold: float) -> tuple["Frontier", Tensor]:
        """Stop the rows whose best drafted path is no likelier than the threshold (c_d, Graft 1.3); bool []: some row
        still drafts."""
        scores = self.layers[-1][2]
        if scores.is_cuda:
            from models import fused_trees

            stage, running = fused_trees.gate(scores, self.stage, gate, threshold, UNGATED)
        else:
            stopped = (self.stage == UNGATED) & (scores.amax(1).exp() <= threshold)
            stage = self.stage.masked_fill(stopped, gate)
            running = (stage == UNGATED).any()
        return replace(self, stage=stage), running

    def candidates(self) -> Candidates:
        tokens, parents, scores = (torch.cat(part, 1) for part in zip(*self.layers, strict=True))
        return Candidates(tokens, parents, scores, self.stage, self.level)


class EagleDrafting:
    """An EAGLE-3 drafter beside the committed text: its cache, and the state it drafts from."""

    def __init__(self, drafter: Eagle3, target: Target, rows: int, capacity: int) -> None:
        self.drafter, self.target, self.vocab = drafter, target, drafter.vocab.to(target.device)
        self.cache: KVCache = drafter.new_cache(rows, capacity)
        self.alive_B = torch.ones(rows, dtype=torch.bool, device=target.device)  # the others draft one layer, no more
        weight = drafter.fc.weight
        self.kernels = kernels(target.device, weight.dtype, drafter.config.head_dim)
        if self.kernels:
            drafter.pack()
        self.state_B1H = torch.zeros(rows, 1, weight.shape[0], device=weight.device, dtype=weight.dtype)

    def part(self, rows: slice) -> "EagleDrafting":
        """Consecutive rows with nothing committed, in the same memory."""
        part = copy.copy(self)
        part.cache, part.state_B1H, part.alive_B = self.cache.part(rows), self.state_B1H[rows], self.alive_B[rows]
        return part

    @torch.no_grad()
    def extend(self, taps_BTC: Tensor, next_ids_BT: Tensor, counts_B: Tensor, counts: list[int] | None) -> None:
        """Commit slots: the target's taps at each, and the token that came after. Rows use their first `counts`, which
        the cache is told of later where they are not given."""
        drafter, dtype = self.drafter, self.drafter.fc.weight.dtype
        states = drafter.step(drafter.fuse(taps_BTC.to(dtype)), self.target.embed(next_ids_BT), self.cache)
        self.cache.keep(counts_B, counts)
        last = states.gather(1, (counts_B - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, states.shape[2]))
        # a row that committed nothing (it has finished) keeps its old state
        self.state_B1H.copy_(torch.where((counts_B > 0).view(-1, 1, 1), last, self.state_B1H))

    def top(self, states_BkH: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and target tokens of each state's k best continuations [B, k', k]."""
        logp, index = top(self.drafter.logits(states_BkH), k)
        return logp, self.vocab.to_target(index)

    @torch.no_grad()
    def open(self, branch: int) -> Frontier:
        """The first layer, which costs no pass: the state that the last committed slot left predicts it."""
        logp, token = self.top(self.state_B1H, branch)
        scores, tokens = logp[:, 0], token[:, 0]
        B, k = tokens.shape
        own = torch.eye(k, dtype=torch.bool, device=tokens.device).expand(B, k, k)
        index = torch.arange(k, device=tokens.device).expand(B, k)
        stage = torch.where(self.alive_B, UNGATED, 0)
        layers = ((tokens, torch.zeros_like(tokens), scores),)
        return Frontier(layers, tokens, scores, index, self.state_B1H.expand(B, k, -1), own, stage, 1)

    @torch.no_grad()
    def grow(self, f: Frontier, level: int) -> Frontier:
        """Draft on to `level` layers (EAGLE-2/3: the best k nodes of each are expanded)."""
        while f.level < level:
            B, k = f.tokens.shape
            states = self.drafter.step(f.states, self.target.embed(f.tokens), self.cache, f.level - 1, f.ancestors)
            if states.is_cuda and self.kernels and self.cache.bucket:
                f = self._expanded(f, states)
                continue
            logp, grown = self.top(states, k)
            running = (f.stage == UNGATED).view(B, 1, 1)
            scores = (f.scores.unsqueeze(2) + logp).masked_fill(~running, float("-inf")).flatten(1)
            layer = (grown.flatten(1), (f.index + 1).unsqueeze(2).expand_as(grown).flatten(1), scores)
            picked = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
            tokens, above = layer[0].gather(1, picked), picked // grown.shape[2]
            f = f.grown(layer, (tokens, scores.gather(1, picked), picked + f.drafted, above), states)
        return f

    def _expanded(self, f: Frontier, states: Tensor) -> Frontier:
        """What the rest of `grow` does to a layer, by the kernels of a GPU."""
        from models import fused_trees

        seen = f.ancestors.to(torch.uint8).contiguous()
        logits, index = self.drafter.fused_logits(states), f.index.contiguous()
        layer, (tokens, scores, index, above, seen) = fused_trees.expand(
            logits, self.vocab.d2t, f.scores.contiguous(), index, f.stage, seen, f.drafted, UNGATED
        )
        states = states.gather(1, above.unsqueeze(2).expand(-1, -1, states.shape[2]))
        return Frontier((*f.layers, layer), tokens, scores, index, states, seen, f.stage, f.level + 1)

    def draft(self, depth: int, branch: int, gates: tuple[float, ...] = (), steps: Steps | None = None) -> Frontier:
        """Draft `depth` layers, stopping early where the gates have stopped every row: one look at the device a gate.

        `steps` captures what lies between two looks.
        """
        steps = steps or Steps(self.state_B1H.device, captures=False)
        f = steps.run(("open", branch), lambda: self.open(branch))
        for gate, (level, threshold) in enumerate(zip(GATE_DEPTHS, gates, strict=False)):
            if level > depth:
                break
            f, running = steps.run(("gate", level), partial(self._to_gate, f, level, gate, threshold))
            if not bool(running):
                return f
        return steps.run(("grow", depth), partial(self.grow, f, depth))

    def _to_gate(self, f: Frontier, level: int, gate: int, threshold: float) -> tuple[Frontier, Tensor]:
        return self.grow(f, level).gated(gate, threshold)


def draft_budgets(nodes: int) -> list[int]:
    """Draft nodes kept at each stage, the last without a gate: round(nodes x {8, 24, 40} / 60), nodes."""
    return [round(nodes * share / 60) for share in GATE_SHARES] + [nodes]


def rerank(candidates: Candidates, roots_B: Tensor, budget_B: Tensor, nodes: int) -> DraftTree:
    """The best candidates by cumulative score, `budget` of each row, as a tree (EAGLE-2's rerank).

    A child never outscores its parent and ties go to the earlier node, so what is kept is closed under parents.
    """
    B, M = candidates.tokens.shape
    keep = min(nodes, M)
    source = torch.full((B, 1 + keep), DRAFTER, device=roots_B.device)
    if roots_B.is_cuda:
        from models import fused_trees

        parts = candidates.tokens, candidates.parents, candidates.scores
        tokens, parents, scores, valid = fused_trees.rerank(*parts, roots_B, budget_B, keep)
        return DraftTree(tokens, parents, scores, source, valid, candidates.depth)
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
        source,
        torch.cat([torch.ones_like(root, dtype=torch.bool), valid], 1),
        candidates.depth,
    )
