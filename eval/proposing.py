"""What each decoder proposes a round: one small object a kind, which the engine asks without knowing which it is.

A proposer reads what it holds of three things, which the engine keeps up to date: a drafter's state, a successor
matrix, and the rows' texts. B rows, N nodes.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eval.copying import Lookup, Suffix
from eval.drafting import GATE_DEPTHS, UNGATED, EagleDrafting, draft_budgets, rerank
from eval.matrix import SuccessorMatrix, graft, retrieve, template
from eval.paths import Drawn, draw_paths
from eval.rules import rule_of
from eval.settings import GATED, Settings
from eval.talon import talon
from eval.tree import FIELDS, RETRIEVAL, DraftTree, compact, merged, root_only
from models.capture import Steps
from models.target import padded


class Laps(Protocol):
    def lap(self, phase: str) -> None: ...


@dataclass(frozen=True)
class Proposal:
    """A round's tree, each row's gate stage and merged nodes [B], and a name for where these lie: what a captured step
    reads must be in the same place whenever the name is the same. Sampled drafts have their laws beside them."""

    tree: DraftTree
    stage: Tensor
    merged: Tensor
    place: Hashable = None
    drawn: Drawn | None = None


class Proposer:
    """Plain decoding: nothing is proposed."""

    line = True  # nodes follow one another, so that neither positions nor masks are needed
    peeks = False  # how sure the drafter is of the tokens that it drafted decides which of them are verified
    drafting: EagleDrafting | None = None
    matrix: SuccessorMatrix | None = None

    def __init__(self, settings: Settings, roots_B: Tensor, fixed: bool) -> None:
        """`roots` are read in place, round after round. `fixed`: a round's shapes are."""
        self.settings, self.roots, self.fixed = settings, roots_B, fixed
        self.root = root_only(roots_B)
        self.stage, self.merged = torch.full_like(roots_B, UNGATED), torch.zeros_like(roots_B)

    def propose(self, steps: Steps, clock: Laps) -> Proposal:
        return Proposal(self.root, self.stage, self.merged)

    def start(self, texts: list[list[int]]) -> None:
        """New rows: each one's prompt and its first token."""

    def hear(self, said: list[list[int]]) -> None:
        """What a round added to each row."""


class Drafted(Proposer):
    """`chain`, `eagle`, and with gates `prune`: a drafter's best nodes, fewer of them where a gate stopped the row."""

    def __init__(self, settings: Settings, roots_B: Tensor, fixed: bool, drafting: EagleDrafting) -> None:
        super().__init__(settings, roots_B, fixed)
        self.drafting: EagleDrafting = drafting
        self.line = settings.decoder == "chain"
        self.branch = 1 if self.line else settings.branch
        depths = GATE_DEPTHS if settings.decoder in GATED else ()
        self.gates = tuple(g for g, d in zip(settings.gates, depths, strict=False) if d <= settings.depth)
        self.peeks = not self.line
        self.kept = draft_budgets(settings.most)
        self.budgets = torch.tensor(self.kept, device=roots_B.device)

    def propose(self, steps: Steps, clock: Laps) -> Proposal:
        f = self.drafting.draft(self.settings.depth, self.branch, self.gates, steps)
        stopped = f.level < self.settings.depth  # all rows: none keeps more than this gate leaves it
        most = self.kept[GATE_DEPTHS.index(f.level)] if stopped else self.settings.most
        tree = steps.run(
            ("rerank", f.level), lambda: rerank(f.candidates(), self.roots, self.budgets[f.stage], max(1, most))
        )
        clock.lap("draft")
        return Proposal(tree, f.stage, self.merged, f.level)


class Grafted(Drafted):
    """`graft`: what the gates left of the draft, and retrieved nodes in the places that they freed."""

    def __init__(
        self, settings: Settings, roots_B: Tensor, fixed: bool, drafting: EagleDrafting, matrix: SuccessorMatrix
    ) -> None:
        super().__init__(settings, roots_B, fixed, drafting)
        self.matrix: SuccessorMatrix = matrix
        nodes, device = settings.nodes, roots_B.device
        shapes = [template(nodes - kept, nodes == 60, device) for kept in self.kept]
        self.shape = shapes[0]  # the widest stage's: the templates are nested
        wanted = [[path in set(shape.paths) for path in self.shape.paths] for shape in shapes]
        self.wanted = torch.tensor(wanted, dtype=torch.bool, device=device)  # [stages, R]
        self.template = self.shape.flat if self.shape.paths else None
        zeros = torch.zeros(len(roots_B), 1 + nodes, dtype=torch.int64, device=device)
        depth = max(settings.depth, len(self.shape.levels))
        self.tree = DraftTree(zeros, zeros.clone(), zeros.float(), zeros.clone(), zeros.bool(), depth)

    def propose(self, steps: Steps, clock: Laps) -> Proposal:
        pruned = super().propose(steps, clock)
        tree = steps.run(("graft", pruned.place), lambda: self.fill(pruned.tree, pruned.stage))
        clock.lap("retrieve")
        return Proposal(tree, self.stage, self.merged)

    def fill(self, tree: DraftTree, stage_B: Tensor) -> DraftTree:
        """Fixed or not, stages and merged counts lie in one place; a fixed tree too."""
        if self.fixed and self.template and stage_B.is_cuda:
            from models import fused_tokens

            self.stage.copy_(stage_B)
            drafted, filled = ([getattr(t, name) for name in FIELDS] for t in (tree, self.tree))
            parts = self.matrix.rows, self.template, self.wanted, self.stage, self.merged
            fused_tokens.graft(drafted, filled, self.roots, *parts, RETRIEVAL)
            return self.tree
        merged = torch.zeros_like(self.merged)
        if self.shape.paths and (self.fixed or bool((stage_B != UNGATED).any())):
            retrieved = retrieve(self.matrix, self.roots, self.shape)
            tree, merged = graft(tree, retrieved, self.wanted[stage_B], self.shape)
        self.stage.copy_(stage_B)
        self.merged.copy_(merged)
        if not self.fixed:
            return compact(tree)
        tree = compact(tree, min(tree.size, 1 + self.settings.most))
        self.tree.valid.zero_()
        for name in FIELDS:
            getattr(self.tree, name)[:, : tree.size] = getattr(tree, name)
        return self.tree


class Recycled(Proposer):
    """`recycle`: the matrix alone (Token Recycling, arXiv 2408.08696), in the most probable rank paths of our weights
    and not in its published tree of 80 nodes; as for `graft`, prompts teach it and cold rows are left out."""

    line = False

    def __init__(self, settings: Settings, roots_B: Tensor, fixed: bool, matrix: SuccessorMatrix) -> None:
        super().__init__(settings, roots_B, fixed)
        self.matrix: SuccessorMatrix = matrix
        self.shape = template(settings.nodes, published=False, device=roots_B.device)
        self.wanted = torch.ones(len(roots_B), len(self.shape.paths), dtype=torch.bool, device=roots_B.device)

    def propose(self, steps: Steps, clock: Laps) -> Proposal:
        tree = steps.run("recycle", self._retrieve)
        clock.lap("retrieve")
        return Proposal(tree, self.stage, self.merged)

    def _retrieve(self) -> DraftTree:
        tree, _ = graft(self.root, retrieve(self.matrix, self.roots, self.shape), self.wanted, self.shape)
        return tree if self.fixed else compact(tree)


class Copied(Proposer):
    """`lookup` and `suffix`: what followed when the row's own text said the same before. The search runs on the host,
    which hears of every token anyway."""

    def __init__(self, settings: Settings, roots_B: Tensor, fixed: bool) -> None:
        super().__init__(settings, roots_B, fixed)
        self.texts: list[Lookup | Suffix] = []
        self.tokens = torch.zeros(len(roots_B), settings.most, dtype=torch.int64, device=roots_B.device)
        self.lengths = torch.zeros_like(roots_B)

    def propose(self, steps: Steps, clock: Laps) -> Proposal:
        drafts = [text.draft(self.settings.most) for text in self.texts]
        longest = max(map(len, drafts))
        self.tokens.copy_(padded(drafts, self.settings.most))
        self.lengths.copy_(torch.tensor([len(draft) for draft in drafts]))
        tree = steps.run("line", lambda: self._line(self.settings.most if self.fixed else longest))
        clock.lap("retrieve")
        return Proposal(tree, self.stage, self.merged)

    def start(self, texts: list[list[int]]) -> None:
        self.texts = [Lookup() if self.settings.decoder == "lookup" else Suffix() for _ in texts]
        self.hear(texts)

    def hear(self, said: list[list[int]]) -> None:
        for text, tokens in zip(self.texts, said, strict=True):
            text.add(tokens)

    def _line(self, width: int) -> DraftTree:
        tokens = torch.cat([self.roots.unsqueeze(1), self.tokens[:, :width]], 1)
        place = torch.arange(1 + width, device=tokens.device).expand_as(tokens)
        valid = place <= self.lengths.unsqueeze(1)
        zeros = torch.zeros_like(tokens)
        return DraftTree(tokens, (place - 1).clamp(min=0), zeros.float(), zeros + RETRIEVAL, valid, width)


class Talon(Proposer):
    """`talon`: a drafter's tree that is deep where it is sure and wide where it is not."""

    line = False
    peeks = True

    def __init__(self, settings: Settings, roots_B: Tensor, fixed: bool, drafting: EagleDrafting) -> None:
        super().__init__(settings, roots_B, fixed)
        self.drafting: EagleDrafting = drafting
        self.budget = torch.full_like(roots_B, settings.nodes)

    def propose(self, steps: Steps, clock: Laps) -> Proposal:
        s = self.settings
        f = talon(self.drafting, s.depth, s.branch, s.nodes, steps, self.fixed)
        tree = steps.run(("rerank", f.level), lambda: rerank(f.candidates(), self.roots, self.budget, s.nodes))
        clock.lap("draft")
        return Proposal(tree if self.fixed else compact(tree), self.stage, self.merged, f.level)


class Sampled(Proposer):
    """`chain` at a draft temperature: K paths drawn independently, merged into a tree, with the laws that `rule` asks
    for. `noise` gives so many uniforms a row [B, n], new ones each round."""

    def __init__(
        self,
        settings: Settings,
        roots_B: Tensor,
        fixed: bool,
        drafting: EagleDrafting,
        vocab_size: int,
        noise: Callable[[int], Tensor],
    ) -> None:
        super().__init__(settings, roots_B, fixed)
        self.drafting: EagleDrafting = drafting
        self.line, self.noise = settings.paths == 1, noise
        rule = rule_of(settings)
        inner = 1 + (settings.depth - 1) * settings.paths if rule is not None and rule.laws else 0
        self.laws = torch.zeros(len(roots_B), inner, vocab_size, device=roots_B.device)

    def propose(self, steps: Steps, clock: Laps) -> Proposal:
        tree, drawn = steps.run("paths", self._draw)
        clock.lap("draft")
        return Proposal(tree, self.stage, self.merged, drawn=drawn)

    def _draw(self) -> tuple[DraftTree, Drawn]:
        s = self.settings
        B, count = len(self.roots), s.paths * s.depth
        noise = self.noise(2 * count + 2)
        shape, parts = (B, s.paths, s.depth), noise.split([count, count, 2], 1)
        tokens = draw_paths(self.drafting, parts[0].view(shape), s.draft_temperature, s.draft_top_p, self.laws)
        return merged(self.roots, tokens), Drawn(tokens, self.laws, parts[1].view(shape), parts[2])


def proposer(
    settings: Settings,
    roots_B: Tensor,
    fixed: bool,
    drafting: EagleDrafting | None,
    vocab_size: int,
    noise: Callable[[int], Tensor] | None = None,
) -> Proposer:
    """The proposer of a decoder; `drafting` is there where `settings.drafts`, `noise` where it samples."""
    assert (drafting is not None) == settings.drafts
    if drafting is not None:
        if settings.samples:
            assert noise is not None
            return Sampled(settings, roots_B, fixed, drafting, vocab_size, noise)
        if settings.decoder == "talon":
            return Talon(settings, roots_B, fixed, drafting)
        if settings.decoder == "graft":
            return Grafted(settings, roots_B, fixed, drafting, SuccessorMatrix(vocab_size, roots_B.device))
        return Drafted(settings, roots_B, fixed, drafting)
    if settings.decoder == "recycle":
        return Recycled(settings, roots_B, fixed, SuccessorMatrix(vocab_size, roots_B.device))
    return Proposer(settings, roots_B, fixed) if settings.decoder == "ar" else Copied(settings, roots_B, fixed)
