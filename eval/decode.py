"""The decoding loop around one target: propose a tree, verify it in one forward, accept a path, commit.

`ar` proposes nothing, `chain` and `eagle` draft, `graft` drafts behind gates and fills freed places by retrieval:
one loop.
B rows, N nodes, D path positions, T prompt positions, C tap width, V vocabulary.
"""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eval.drafting import GATE_DEPTHS, UNGATED, EagleDrafting, draft_budgets, rerank
from eval.matrix import WIDTH, SuccessorMatrix, Template, graft, retrieve, template
from eval.tree import RETRIEVAL, DraftTree, compact, root_only
from eval.verify import walk
from models.eagle3 import Eagle3
from models.sampling import draw, law, uniforms
from models.target import Target

DECODERS = ("ar", "chain", "eagle", "graft")
STAGES = ("d0", "d1", "d5", "none")
PREFILL_LOGITS = 512  # positions whose logits are formed at once


@dataclass(frozen=True)
class Settings:
    """How to decode; for `chain`, depth is the draft length and nodes and branch do not count."""

    decoder: str = "ar"
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    depth: int = 8
    branch: int = 10
    nodes: int = 60
    gates: tuple[float, ...] = (0.15, 0.14, 0.50)


@dataclass
class RowResult:
    """One prompt's output and its rounds. `tokens` starts with the one that prefill yields: it belongs to no round."""

    tokens: list[int] = field(default_factory=list)
    rounds: int = 0
    emitted: int = 0  # tokens that rounds emitted and the cut left
    accepted: int = 0  # of these, drafts
    accepted_per_round: list[int] = field(default_factory=list)
    drafted_depth_per_round: list[int] = field(default_factory=list)
    positions_offered: list[int] = field(default_factory=list)  # rounds that drafted at depth j + 1, uncut
    positions_accepted: list[int] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=lambda: {"drafter": 0, "retrieval": 0})
    stages: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    merged: int = 0  # retrieved nodes that the draft already had
    nodes: int = 0  # verified nodes over all rounds, roots not counted
    done: bool = False


@dataclass(frozen=True)
class Decoded:
    """`seconds` by phase (prefill apart); `decode_seconds` is the wall time after prefill; rounds are batch rounds."""

    rows: list[RowResult]
    seconds: dict[str, float]
    decode_seconds: float
    rounds_total: int


class _Clock:
    """Seconds by phase; on a GPU each phase ends with a synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(("prefill", "draft", "retrieve", "verify", "accept", "cache"), 0.0)
        self._sync = torch.cuda.synchronize if device.type == "cuda" else None
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        if self._sync is not None:
            self._sync()
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now


class _Decoding:
    """The state of one batch: caches of target and drafter, the matrix, and what each row has said."""

    def __init__(
        self, target: Target, drafter: Eagle3 | None, prompts: list[list[int]], settings: Settings,
        matrix: SuccessorMatrix | None, row_ids: list[int] | None,
    ) -> None:  # fmt: skip
        self.target, self.settings, self.prompts = target, settings, prompts
        self.lengths = [len(p) for p in prompts]
        room = settings.nodes + settings.depth * (settings.branch + 1) + 16
        capacity = max(self.lengths) + settings.max_new_tokens + room
        self.cache = target.new_cache(len(prompts), capacity)
        drafts = settings.decoder != "ar"
        assert drafter is not None or not drafts
        self.drafting = EagleDrafting(drafter, target, len(prompts), capacity) if drafts and drafter else None
        self.matrix = matrix
        if settings.decoder == "graft" and matrix is None:
            self.matrix = SuccessorMatrix(target.vocab_size, target.device)
        self.row_ids = torch.tensor(row_ids or list(range(len(prompts))), device=target.device)
        self.rows = [RowResult() for _ in prompts]
        self.roots = torch.empty(0)
        self.shape, self.wanted = (None, None) if settings.decoder != "graft" else _templates(settings, target.device)
        self.clock = _Clock(target.device)

    def choose(self, logits_BV: Tensor, positions_B: Tensor) -> Tensor:
        """The target's own next token: the arg-max, or a draw with the noise of (seed, row, position)."""
        s = self.settings
        if s.temperature == 0:
            return logits_BV.argmax(-1)
        noise = uniforms(s.seed, self.row_ids, positions_B)
        return draw(law(logits_BV.double(), s.temperature, s.top_k, s.top_p), noise)

    @torch.no_grad()
    def prefill(self) -> None:
        target, device = self.target, self.target.device
        T = max(self.lengths)
        ids = torch.zeros(len(self.prompts), T, dtype=torch.int64)
        for i, prompt in enumerate(self.prompts):
            ids[i, : len(prompt)] = torch.tensor(prompt)
        ids = ids.to(device)
        states = target.prefill(ids, self.lengths, self.cache)
        ends = torch.tensor(self.lengths, device=device)
        rows = torch.arange(len(ids), device=device)
        self.roots = self.choose(target.logits(states.final_BTH[rows, ends - 1]), ends)
        if self.drafting is not None:
            following = torch.cat([ids[:, 1:], ids[:, :1]], 1)
            following[rows, ends - 1] = self.roots
            self.drafting.extend(states.taps_BTC, following, ends, self.lengths)
        if self.settings.decoder == "graft" and self.matrix is not None:
            real = torch.arange(T, device=device) < ends.unsqueeze(1)
            for start in range(0, T, PREFILL_LOGITS):
                part = slice(start, start + PREFILL_LOGITS)
                best = target.logits(states.final_BTH[:, part]).topk(WIDTH, -1).indices
                self.matrix.update(ids[:, part][real[:, part]], best[real[:, part]])
        for row, token in zip(self.rows, self.roots.tolist(), strict=True):
            row.tokens.append(token)
            row.done = token in target.eos_ids or self.settings.max_new_tokens <= 1
        self.clock.lap("prefill")

    def propose(self) -> tuple[DraftTree, Tensor | None, Tensor | None]:
        """This round's tree, each row's gate stage and merged count (Graft alone)."""
        s = self.settings
        if self.drafting is None:
            return root_only(self.roots), None, None
        branch, nodes = (1, s.depth) if s.decoder == "chain" else (s.branch, s.nodes)
        gates = (
            tuple(g for g, d in zip(s.gates, GATE_DEPTHS, strict=False) if d <= s.depth) if s.decoder == "graft" else ()
        )
        found = self.drafting.candidates(s.depth, branch, gates)
        budgets = torch.tensor(draft_budgets(nodes), device=self.roots.device)
        tree = rerank(found, self.roots, budgets[found.stage], nodes)
        self.clock.lap("draft")
        if s.decoder != "graft" or self.matrix is None or self.shape is None or self.wanted is None:
            return tree, None, None
        merged = torch.zeros_like(self.roots)
        if bool((found.stage != UNGATED).any()):
            tree, merged = graft(
                tree, retrieve(self.matrix, self.roots, self.shape), self.wanted[found.stage], self.shape
            )
        tree = compact(tree)
        self.clock.lap("retrieve")
        return tree, found.stage, merged

    @torch.no_grad()
    def round(self) -> None:
        target, s = self.target, self.settings
        tree, stage, merged = self.propose()
        chain = tree.size == 1 or s.decoder == "chain"
        ancestors = None if chain else tree.ancestors()
        depths = None if ancestors is None else ancestors.sum(2) - 1
        states = target.forward(tree.tokens, self.cache, depths, ancestors)
        logits = target.logits(states.final_BTH)
        greedy = logits.argmax(-1) if s.temperature == 0 else None
        self.clock.lap("verify")
        rows = torch.arange(len(self.rows), device=self.roots.device)
        start = self.cache.lengths + 1  # the position of the first token that this round chooses

        def choose(node_B: Tensor, depth: int) -> Tensor:
            return greedy[rows, node_B] if greedy is not None else self.choose(logits[rows, node_B], start + depth)

        path, accepted, bonus = walk(tree, choose)
        if s.decoder == "graft" and self.matrix is not None:
            self._remember(tree, path, logits)
        said = tree.tokens.gather(1, path)  # root, then accepted drafts
        said = torch.cat([said[:, 1:], bonus.unsqueeze(1)], 1).scatter(1, accepted.unsqueeze(1), bonus.unsqueeze(1))
        facts = [accepted, tree.valid.sum(1) - 1, stage, merged]
        host = torch.stack([f if f is not None else torch.zeros_like(accepted) for f in facts], 1).tolist()
        sources = tree.source.gather(1, path).tolist() if s.decoder == "graft" else None
        counts = self._record(said.tolist(), host, sources, self._drafted(tree))
        self.clock.lap("accept")
        counts_B = torch.tensor(counts, device=self.roots.device)
        width = max(counts)
        self.roots = torch.where(counts_B > 0, bonus, self.roots)
        self.cache.keep(counts_B, counts, None if chain else path[:, :width])
        self.clock.lap("cache")
        if self.drafting is not None and not all(row.done for row in self.rows):
            index = path[:, :width].unsqueeze(2).expand(-1, -1, states.taps_BTC.shape[2])
            self.drafting.extend(states.taps_BTC.gather(1, index), said[:, :width], counts_B, counts)
            self.clock.lap("draft")

    def _drafted(self, tree: DraftTree) -> list[int]:
        """The deepest drafted depth of each row."""
        if self.settings.decoder in ("ar", "chain"):
            return [tree.depth] * len(self.rows)
        depths = (tree.ancestors().sum(2) - 1) * tree.valid
        found: list[int] = depths.amax(1).tolist()
        return found

    def _remember(self, tree: DraftTree, path: Tensor, logits: Tensor) -> None:
        """Every verified node of an unfinished row teaches the matrix; for one token the accepted path wins, then the
        higher score."""
        running = torch.tensor([not row.done for row in self.rows], device=tree.tokens.device).unsqueeze(1)
        on_path = torch.zeros_like(tree.valid).scatter(1, path, True)
        priority = tree.scores.clamp(-1e5, 0.0) + on_path * 1e6  # retrieved nodes score -1e9, accepted ones too
        order = priority.flatten().sort(stable=True).indices
        order = order[(tree.valid & running).flatten()[order]]
        best = logits.topk(WIDTH, -1).indices.flatten(0, 1)
        assert self.matrix is not None
        self.matrix.update(tree.tokens.flatten()[order], best[order])

    def _record(
        self, said: list[list[int]], facts: list[list[int]], sources: list[list[int]] | None, drafted: list[int]
    ) -> list[int]:
        """Book this round on the host; returns how many tokens each row commits to the caches (0 for finished rows)."""
        counts = []
        for i, row in enumerate(self.rows):
            if row.done:
                counts.append(0)
                continue
            accepted, nodes, stage, merged = facts[i]
            emitted = 0
            for token in said[i][: accepted + 1]:
                row.tokens.append(token)
                emitted += 1
                if token in self.target.eos_ids or len(row.tokens) >= self.settings.max_new_tokens:
                    row.done = True
                    break
            kept = min(accepted, emitted)
            _book(row, kept, emitted, drafted[i], cut=emitted <= accepted)
            row.nodes += nodes
            if sources is not None:
                from_matrix = sum(source == RETRIEVAL for source in sources[i][1 : kept + 1])
                row.sources["retrieval"] += from_matrix
                row.sources["drafter"] += kept - from_matrix
                row.stages[STAGES[stage]] += 1
                row.merged += merged
            else:
                row.sources["drafter"] += kept
            counts.append(accepted + 1)
        return counts


def _book(row: RowResult, kept: int, emitted: int, drafted: int, cut: bool) -> None:
    """One round of a row: `kept` accepted drafts of `emitted` tokens; what was cut counts neither way."""
    row.rounds += 1
    row.emitted += emitted
    row.accepted += kept
    row.accepted_per_round.append(kept)
    row.drafted_depth_per_round.append(drafted)
    offered = kept if cut else drafted
    for counts in (row.positions_offered, row.positions_accepted):
        counts.extend([0] * (offered - len(counts)))
    for j in range(offered):
        row.positions_offered[j] += 1
        row.positions_accepted[j] += j < kept


def _templates(settings: Settings, device: torch.device) -> tuple[Template | None, Tensor | None]:
    """The widest stage's template, and which of its nodes each stage wants [stages, R]: the templates are nested."""
    shapes = [template(settings.nodes - kept, settings.nodes == 60) for kept in draft_budgets(settings.nodes)]
    widest = shapes[0]
    if not widest.paths:
        return None, None
    wanted = [[path in set(shape.paths) for path in widest.paths] for shape in shapes]
    return widest, torch.tensor(wanted, device=device)


def decode(
    target: Target,
    drafter: Eagle3 | None,
    prompts: list[list[int]],
    settings: Settings,
    matrix: SuccessorMatrix | None = None,
    row_ids: list[int] | None = None,
) -> Decoded:
    """Decode a batch of prompts (token ids, ragged). `matrix` is carried: Graft reads and updates it in place; without
    one it starts cold. `row_ids` name the rows' noise at T > 0, so that an output does not depend on its batch."""
    state = _Decoding(target, drafter, prompts, settings, matrix, row_ids)
    state.prefill()
    begun, rounds = time.perf_counter(), 0
    while not all(row.done for row in state.rows):
        state.round()
        rounds += 1
    return Decoded(state.rows, state.clock.seconds, time.perf_counter() - begun, rounds)
