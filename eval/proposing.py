"""What each decoder proposes a round: one small object a kind, which the engine asks without knowing which it is.

A proposer reads what it holds of three things, which the engine keeps up to date: a drafter's state, a successor
matrix, and the rows' texts. B rows, N nodes.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from eval.blocks import BlockDrafting, confident, filled
from eval.copying import Lookup, Suffix
from eval.drafting import GATE_DEPTHS, UNGATED, EagleDrafting, draft_budgets, rerank
from eval.matrix import SuccessorMatrix, by_weight, graft, hang, retrieve, template
from eval.paths import Drawn, draw_paths
from eval.rules import rule_of
from eval.settings import BLOCKED, GATED, Settings
from eval.talon import talon
from eval.tree import FIELDS, RETRIEVAL, DraftTree, compact, merged, root_only
from models.cache import KVCache
from models.capture import Steps
from models.target import States, padded
from recipes.schema import UserError

COPIED = 20  # tokens that `splice` takes from a repeated suffix, at most


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


class Texts:
    """The rows' own texts, searched on the host, which hears of every token anyway; what they draft, on the device."""

    def __init__(self, kind: type[Lookup] | type[Suffix], most: int, roots_B: Tensor) -> None:
        self.kind, self.most = kind, most
        self.rows = [kind() for _ in range(len(roots_B))]
        self.tokens = torch.zeros(len(roots_B), most, dtype=torch.int64, device=roots_B.device)
        self.lengths = torch.zeros_like(roots_B)

    def start(self, row: int, text: list[int]) -> None:
        self.rows[row] = self.kind()
        self.rows[row].add(text)

    def hear(self, said: list[list[int]]) -> None:
        for text, tokens in zip(self.rows, said, strict=True):
            text.add(tokens)

    def draft(self) -> int:
        """Fill `tokens` [B, most] and `lengths` [B], each in its place; returns the longest length."""
        drafts = [text.draft(self.most) for text in self.rows]
        self.tokens.copy_(padded(drafts, self.most))
        self.lengths.copy_(torch.tensor([len(draft) for draft in drafts]))
        return max(map(len, drafts))


class Proposer:
    """Plain decoding: nothing is proposed."""

    line = True  # nodes follow one another, so that neither positions nor masks are needed
    peeks = False  # how sure the drafter is of the tokens that it drafted decides which of them are verified
    drafting: EagleDrafting | BlockDrafting | None = None
    matrix: SuccessorMatrix | None = None
    forward: Callable[[Tensor, KVCache], States] | None = None  # of a line, instead of the target's own

    def __init__(self, settings: Settings, roots_B: Tensor, fixed: bool) -> None:
        """`roots` are read in place, round after round. `fixed`: a round's shapes are."""
        self.settings, self.roots, self.fixed = settings, roots_B, fixed
        self.root = root_only(roots_B)
        self.stage, self.merged = torch.full_like(roots_B, UNGATED), torch.zeros_like(roots_B)

    def propose(self, steps: Steps, clock: Laps) -> Proposal:
        return Proposal(self.root, self.stage, self.merged)

    def start(self, row: int, text: list[int]) -> None:
        """A new text in a row: its prompt and first token."""

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
    """`graft`: what the gates left of the draft, and retrieved nodes in the places that they freed. A departure of
    ours, unless settings.graft_fill says always: while these do not pay (`eval.filling`) the places stay empty."""

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
        self.none = torch.zeros_like(roots_B)  # merged, where nothing was filled; `merged` holds what fills found
        depth = max(settings.depth, len(self.shape.levels))
        self.tree = DraftTree(zeros, zeros.clone(), zeros.float(), zeros.clone(), zeros.bool(), depth)

    def propose(self, steps: Steps, clock: Laps) -> Proposal:
        pruned = super().propose(steps, clock)
        if self.settings.graft_fill != "always" and not self.matrix.filling.pays:
            return replace(pruned, tree=pruned.tree if self.fixed else compact(pruned.tree), merged=self.none)
        tree = steps.run(("graft", pruned.place), lambda: self.fill(pruned.tree, pruned.stage))
        clock.lap("retrieve")
        return Proposal(tree, self.stage, self.merged)

    def fill(self, tree: DraftTree, stage_B: Tensor) -> DraftTree:
        """Fixed or not, stages and merged counts lie in one place; a fixed tree too."""
        if self.fixed and self.template and stage_B.is_cuda:
            from models import fused_trees

            self.stage.copy_(stage_B)
            drafted, filled = ([getattr(t, name) for name in FIELDS] for t in (tree, self.tree))
            parts = self.matrix.rows, self.template, self.wanted, self.stage, self.merged
            fused_trees.graft(drafted, filled, self.roots, *parts, RETRIEVAL, len(self.shape.levels))
            return self.tree
        merged = torch.zeros_like(self.merged)
        if self.shape.paths and (self.fixed or bool((stage_B != UNGATED).any())):
            tree, merged = self.grown(tree, stage_B)
        self.stage.copy_(stage_B)
        self.merged.copy_(merged)
        if not self.fixed:
            return compact(tree)
        tree = compact(tree, min(tree.size, 1 + self.settings.most))
        self.tree.valid.zero_()
        for name in FIELDS:
            getattr(self.tree, name)[:, : tree.size] = getattr(tree, name)
        return self.tree

    def grown(self, tree: DraftTree, stage_B: Tensor) -> tuple[DraftTree, Tensor]:
        """The tree with retrieved nodes where the gates freed places, and how many of these it had already [B]."""
        return graft(tree, retrieve(self.matrix, self.roots, self.shape), self.wanted[stage_B], self.shape)


class Spliced(Grafted):
    """`splice`, ours: `graft` where what followed the row's longest repeated suffix comes first, and the matrix, which
    knows one token of context, gets the places that this leaves."""

    def __init__(
        self, settings: Settings, roots_B: Tensor, fixed: bool, drafting: EagleDrafting, matrix: SuccessorMatrix
    ) -> None:
        super().__init__(settings, roots_B, fixed, drafting, matrix)
        self.texts = Texts(Suffix, min(COPIED, max(settings.nodes - kept for kept in self.kept)), roots_B)
        self.tree = replace(self.tree, depth=max(self.tree.depth, self.texts.most))
        self.template = None  # no kernel grafts twice
        self.free = settings.nodes - self.budgets  # [stages], for retrieval
        likely = [self.shape.paths.index(path) for path in by_weight(self.shape.paths)]
        wanted = self.wanted[:, likely]
        self.ranks = torch.empty_like(self.wanted, dtype=torch.int64)  # [stages, R]: from 0; where not wanted, the last
        self.ranks[:, likely] = (wanted.cumsum(1) - 1).masked_fill(~wanted, len(likely))

    def propose(self, steps: Steps, clock: Laps) -> Proposal:
        self.texts.draft()
        clock.lap("retrieve")
        return super().propose(steps, clock)

    def grown(self, tree: DraftTree, stage_B: Tensor) -> tuple[DraftTree, Tensor]:
        free = self.free[stage_B]
        length = torch.minimum(self.texts.lengths, free)
        tree, merged = hang(tree, self.texts.tokens, length)
        left = (free - length + merged).unsqueeze(1)
        retrieved = retrieve(self.matrix, self.roots, self.shape)
        tree, also = graft(tree, retrieved, self.ranks[stage_B] < left, self.shape)
        return tree, merged + also

    def start(self, row: int, text: list[int]) -> None:
        self.texts.start(row, text)

    def hear(self, said: list[list[int]]) -> None:
        self.texts.hear(said)


class Blocked(Proposer):
    """A block drafter's line of `depth` places: all of it (`chain`), its confident beginning (`prune`; `flex`, which
    keeps one draft at least), or this and the matrix's guesses in the places behind it (`graft`)."""

    def __init__(self, settings: Settings, roots_B: Tensor, fixed: bool, drafting: BlockDrafting, vocab: int) -> None:
        super().__init__(settings, roots_B, fixed)
        if settings.decoder not in BLOCKED or settings.samples:
            raise UserError(
                f"decoder={settings.decoder} is not for a drafter of lines. Use {', '.join(BLOCKED)}, greedily"
            )
        self.drafting: BlockDrafting = drafting
        self.matrix = SuccessorMatrix(vocab, roots_B.device) if settings.remembers else None
        self.forward = drafting.verify if settings.parallel else None
        gate = settings.gates[0] if settings.decoder in (*GATED, "flex") else 0.0
        self.peeks, self.bar = gate > 0, math.log(gate) if gate else -math.inf
        self.least = int(settings.decoder == "flex")

    def hear(self, said: list[list[int]]) -> None:
        self.drafting.ready = self.settings.parallel

    def propose(self, steps: Steps, clock: Laps) -> Proposal:
        tokens, logp = steps.run(("block", self.drafting.ready), lambda: self.drafting.block(self.settings.depth))
        clock.lap("draft")
        tree, stage = steps.run(("fill", self.drafting.ready), lambda: self.fill(tokens, logp))
        clock.lap("retrieve")
        return Proposal(tree, stage, self.merged, self.drafting.ready)

    def fill(self, tokens_BL: Tensor, logp_BL: Tensor) -> tuple[DraftTree, Tensor]:
        """The line, and each row's stage: its first gate's where the line was cut."""
        kept = confident(logp_BL, self.bar)
        kept[:, : self.least] = True
        tree = filled(self.roots, tokens_BL, logp_BL, kept, self.matrix)
        return tree if self.fixed else compact(tree), torch.where(kept.all(1), UNGATED, 0)


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
    """`lookup` and `suffix`: what followed when the row's own text said the same before."""

    def __init__(self, settings: Settings, roots_B: Tensor, fixed: bool) -> None:
        super().__init__(settings, roots_B, fixed)
        self.texts = Texts(Lookup if settings.decoder == "lookup" else Suffix, settings.most, roots_B)

    def propose(self, steps: Steps, clock: Laps) -> Proposal:
        longest = self.texts.draft()
        tree = steps.run("line", lambda: self._line(self.settings.most if self.fixed else longest))
        clock.lap("retrieve")
        return Proposal(tree, self.stage, self.merged)

    def start(self, row: int, text: list[int]) -> None:
        self.texts.start(row, text)

    def hear(self, said: list[list[int]]) -> None:
        self.texts.hear(said)

    def _line(self, width: int) -> DraftTree:
        tokens = torch.cat([self.roots.unsqueeze(1), self.texts.tokens[:, :width]], 1)
        place = torch.arange(1 + width, device=tokens.device).expand_as(tokens)
        valid = place <= self.texts.lengths.unsqueeze(1)
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
    drafting: EagleDrafting | BlockDrafting | None,
    vocab_size: int,
    noise: Callable[[int], Tensor] | None = None,
) -> Proposer:
    """The proposer of a decoder; `drafting` is there where `settings.drafts`, `noise` where it samples."""
    assert (drafting is not None) == settings.drafts
    if drafting is not None:
        if not isinstance(drafting, EagleDrafting):
            return Blocked(settings, roots_B, fixed, drafting, vocab_size)
        if settings.samples:
            assert noise is not None
            return Sampled(settings, roots_B, fixed, drafting, vocab_size, noise)
        if settings.decoder == "talon":
            return Talon(settings, roots_B, fixed, drafting)
        if settings.remembers:
            kind = Spliced if settings.decoder == "splice" else Grafted
            return kind(settings, roots_B, fixed, drafting, SuccessorMatrix(vocab_size, roots_B.device))
        return Drafted(settings, roots_B, fixed, drafting)
    if settings.decoder == "recycle":
        return Recycled(settings, roots_B, fixed, SuccessorMatrix(vocab_size, roots_B.device))
    return Proposer(settings, roots_B, fixed) if settings.decoder == "ar" else Copied(settings, roots_B, fixed)
