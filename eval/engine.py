"""The device side of decoding: one batch's caches and the phases of its rounds, without a decision on the host.

On a GPU all shapes are fixed, each phase is captured and replayed, and a round looks at the device once, besides once a
gate. On a CPU the same functions run as they stand, on no more rows than the round needs.
B rows, N nodes, D path positions, T prompt positions, C tap width, V vocabulary.
"""

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eval.blocks import BlockDrafting
from eval.drafters import Drafter, drafting_of
from eval.drafting import UNGATED, EagleDrafting
from eval.matrix import WIDTH, SuccessorMatrix
from eval.paths import Drawn
from eval.proposing import Proposal, proposer
from eval.rules import Rule, faults, guard, refuse, rule_of, verify
from eval.settings import Settings
from eval.tree import RETRIEVAL, DraftTree
from eval.verify import Drafts, accept, told, walk
from models.cache import KVCache
from models.capture import Steps, ask
from models.sampling import best, law, sample, top, uniforms
from models.target import States, Target, padded, refuse_nan

PREFILL_LOGITS = 1024  # of prompts, formed at once: rows x positions
ROUNDING = 256  # of capacities
EVERY_ROW = slice(None)
SAMPLED = 0x51ED0000  # between the seeds of what the target and what the drafter draws
PHASES = ("prefill", "draft", "retrieve", "verify", "accept", "cache")


@dataclass(frozen=True)
class Facts:
    """What the host must know of a row's round: its tokens (accepted drafts, then the bonus), how many drafts were
    accepted, the verified nodes, the gate stage, the merged nodes, the drafted depth, who drafted each token, and which
    of eval.rules.FAULTS its laws have."""

    said: list[int]
    accepted: int
    nodes: int
    stage: int
    merged: int
    drafted: int
    sources: list[int]
    faults: list[bool]


def _facts(row: list[int], width: int) -> Facts:
    """Read off what `eval.verify.told` packed: five numbers, what was said and who drafted each node, `width` of each,
    and the faults of its laws if they were looked at."""
    accepted, nodes, stage, merged, drafted = row[:5]
    sources = row[6 + width : 6 + width + accepted]  # the first one is the root's
    faults = [number > 0 for number in row[5 + 2 * width :]]
    return Facts(row[5 : 6 + accepted], accepted, nodes, stage, merged, drafted, sources, faults)


class Clock:
    """Seconds by phase: read off events on a GPU, so that nothing waits for them."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = [("", self._now())]

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, phase: str) -> None:
        self._marks.append((phase, self._now()))

    def settle(self) -> dict[str, float]:
        if self._cuda:
            torch.cuda.synchronize()
        for (_, before), (phase, after) in zip(self._marks, self._marks[1:], strict=False):
            self.seconds[phase] += before.elapsed_time(after) / 1000 if self._cuda else after - before
        self._marks = self._marks[-1:]
        return self.seconds


@dataclass(frozen=True)
class Verified:
    """The target's word on a tree: its taps [B, N, C], logits [B, N, V], and where that costs little, which on a CPU is
    at T = 0, its token after every node [B, N]; and each node's depth [B, N], where it is not a line."""

    taps: Tensor
    logits: Tensor
    chosen: Tensor | None
    depths: Tensor | None


def drafting_noise(seed: int, row_ids_B: Tensor, cache: KVCache, count: int) -> Tensor:
    """Uniforms of a round [B, count], by (seed, row, position) as those of `Engine.choose`, but apart from them."""
    places = cache.lengths.unsqueeze(1) * count + torch.arange(count, device=row_ids_B.device)
    return uniforms(seed + SAMPLED, row_ids_B.unsqueeze(1), places)


class Engine:
    """One decoder on as many rows as its caches have; they may be shared with engines that never run at once."""

    def __init__(
        self,
        target: Target,
        settings: Settings,
        cache: KVCache,
        drafting: EagleDrafting | BlockDrafting | None,
        fixed: bool | None = None,
    ) -> None:
        self.target, self.settings, self.cache, self.drafting = target, settings, cache, drafting
        device, rows = target.device, cache.rows
        self.fixed = device.type == "cuda" if fixed is None else fixed  # shapes are
        self.steps = Steps(device, captures=self.fixed and not target.sharded)
        self.roots = torch.zeros(rows, dtype=torch.int64, device=device)
        self.row_ids = torch.zeros_like(self.roots)
        alone = torch.ones(rows, dtype=torch.bool, device=device)
        self.alive = drafting.alive_B if isinstance(drafting, EagleDrafting) else alone
        self.index = torch.arange(rows, device=device)
        self.rule = rule_of(settings)
        noise = partial(drafting_noise, settings.seed, self.row_ids, cache)  # holds no engine: no cycle keeps caches
        self.proposer = proposer(settings, self.roots, self.fixed, drafting, target.vocab_size, noise)
        guard(self.rule, self.proposer.peeks)
        self.matrix = self.proposer.matrix
        self._waiting: tuple[Verified, Tensor, Tensor, list[int]] | None = None

    def choose(self, logits: Tensor, positions: Tensor, rows: slice = EVERY_ROW) -> Tensor:
        """The target's own next token, the arg-max or a draw with the noise of (seed, row, position):
        [B, ..., V], [B, ...] -> [B, ...]."""
        s = self.settings
        if s.temperature == 0:
            return best(logits)
        ids = self.row_ids[rows].view(-1, *[1] * (positions.dim() - 1))
        return sample(logits, s.temperature, s.top_k, s.top_p, uniforms(s.seed, ids, positions))

    @torch.no_grad()
    def prefill(self, prompts: list[list[int]], row_ids: list[int], matrix: SuccessorMatrix | None) -> list[int]:
        """Read the first prompts, one a row; returns their first tokens. `matrix` is copied in, and out by `save`."""
        self.steps.join()
        self._waiting = None
        self.alive.fill_(True)
        if self.matrix is not None:
            self.matrix.assign(matrix)
        return self._read(0, prompts, row_ids)

    @torch.no_grad()
    def admit(self, row: int, prompt: list[int], row_id: int, clock: Clock) -> int:
        """Between rounds: read a prompt into a row whose own has ended; returns its first token."""
        self.steps.join()
        self._commit_waiting(clock)
        return self._read(row, [prompt], [row_id])[0]

    def _read(self, start: int, prompts: list[list[int]], row_ids: list[int]) -> list[int]:
        """Prompts into the rows from `start` on, whatever these held."""
        target, device, rows = self.target, self.target.device, slice(start, start + len(prompts))
        lengths, longest = [len(p) for p in prompts], max(map(len, prompts))
        ids, ends = padded(prompts, longest + 1).to(device), torch.tensor(lengths, device=device)
        self.row_ids[rows] = torch.tensor(row_ids, device=device)
        drafting = self.drafting.part(rows) if self.drafting is not None else None

        def see(part: slice, states: States) -> None:
            if drafting is not None:  # all but each row's last slot, for which the token that follows is not chosen yet
                counts = [min(max(n - 1 - part.start, 0), part.stop - part.start) for n in lengths]
                following = ids[:, part.start + 1 : part.stop + 1]
                drafting.extend(states.taps_BTC, following, torch.tensor(counts, device=device), counts)
            if self.matrix is not None:
                teach(self.matrix, ids[:, part], states.final_BTH, ends - part.start, target)

        last = target.prefill(ids[:, :longest], lengths, self.cache.part(rows), see)
        self.roots[rows] = self.choose(refuse_nan(target.logits(last.final_BTH[:, 0])), ends, rows)
        if drafting is not None:
            one = [1] * len(prompts)
            drafting.extend(last.taps_BTC, self.roots[rows].unsqueeze(1), torch.ones_like(ends), one)
        for cache in self._caches():
            cache.host[rows] = lengths
        first: list[int] = self.roots[rows].tolist()
        for row, (prompt, token) in enumerate(zip(prompts, first, strict=True), start):
            self.proposer.start(row, [*prompt, token])
        return first

    def finish(self, done: list[bool]) -> None:
        """Rows that are done commit nothing more and teach the matrix nothing."""
        self.steps.join()
        self.alive.copy_(~torch.tensor(done))

    def save(self, matrix: SuccessorMatrix | None) -> None:
        self.steps.join()
        if matrix is not None and self.matrix is not None:
            matrix.assign(self.matrix)

    def _caches(self) -> list[KVCache]:
        return [self.cache] + ([self.drafting.cache] if self.drafting is not None else [])

    @torch.no_grad()
    def round(self, clock: Clock, done: list[bool]) -> list[Facts]:
        """Propose, verify, accept and commit; `done` rows ride along."""
        self._commit_waiting(clock)
        self.steps.join()
        if self.fixed:
            rooms = (self.settings.room, self.settings.draft_room)
            for cache, room in zip(self._caches(), rooms, strict=False):
                # the fused kernels read what is there, whatever the bucket
                cache.bucket = cache.capacity if self.target.kernels else rounded(cache.high + room)
            self.steps.scope = self.cache.bucket
        proposal = self.proposer.propose(self.steps, clock)
        self.steps.scope = self.cache.bucket, proposal.place
        verified = self.steps.run("verify", lambda: self._verify(proposal.tree))
        clock.lap("verify")
        path, said, facts = self.steps.run("accept", lambda: self._accept(proposal, verified))
        answer = ask(facts)
        if self.matrix is not None:
            # beside commit and extend, which were recorded after what it reads, but not beside the next draft
            taught = self.matrix, proposal.tree, path, verified.logits, self.alive
            self.steps.beside("remember", lambda: remember(*taught))
        clock.lap("accept")
        self.seen = proposal.tree, path  # for whoever draws it, until the next round
        if self.fixed:
            counts_B = self.steps.run("commit", lambda: self._settle(verified, path, said, facts))
            clock.lap("cache")
            if self.drafting is not None:
                self.steps.run("extend", lambda: self._extend(verified, path, said, counts_B, None))
                clock.lap("draft")
        read = answer()
        counts = [0 if over else row[0] + 1 for row, over in zip(read, done, strict=True)]
        if self.fixed:
            for cache in self._caches():
                cache.note(counts)
        else:
            self._waiting = verified, path, said, counts
        found = [_facts(row, said.shape[1]) for row in read]
        refuse([[] if over else fact.faults for fact, over in zip(found, done, strict=True)])
        self.proposer.hear([[] if over else fact.said for fact, over in zip(found, done, strict=True)])
        self._account([fact for fact, over in zip(found, done, strict=True) if not over])
        return found

    def _account(self, live: list[Facts]) -> None:
        """Book what retrieval won in a round in which a gate freed places."""
        if self.matrix is not None and any(fact.stage != UNGATED for fact in live):
            retrieved = sum(fact.sources.count(RETRIEVAL) for fact in live)
            self.matrix.filling = self.matrix.filling.after(len(live), retrieved)

    def _commit_waiting(self, clock: Clock) -> None:
        """Commit the round before this one, as wide as its longest path: a last round is never committed."""
        if self._waiting is None:
            return
        v, path, said, counts = self._waiting
        self._waiting, width, counts_B = None, max(counts), torch.tensor(counts, device=self.roots.device)
        self._commit(v, path[:, :width], said[:, :width], counts_B, counts)
        clock.lap("cache")
        if self.drafting is not None:
            self._extend(v, path[:, :width], said[:, :width], counts_B, counts)
            clock.lap("draft")

    def _verify(self, tree: DraftTree) -> Verified:
        target = self.target
        ancestors, depths = (None, None) if self.proposer.line or tree.size == 1 else tree.outline()
        if self.proposer.forward is not None:
            states = self.proposer.forward(tree.tokens, self.cache)
        else:
            states = target.forward(tree.tokens, self.cache, depths, ancestors)
        logits, chosen = target.logits(states.final_BTH), None
        s = self.settings
        if self.rule is None and (s.temperature == 0 or (logits.is_cuda and s.top_k == 0 and s.top_p >= 1)):
            behind = torch.arange(tree.size, device=logits.device) if depths is None else depths
            chosen = self.choose(logits, self.cache.lengths.unsqueeze(1) + 1 + behind)
        return Verified(states.taps_BTC, logits, chosen, depths)

    def _accept(self, proposal: Proposal, v: Verified) -> tuple[Tensor, Tensor, Tensor]:
        """The accepted path [B, D] of nodes, what it says [B, D] (drafts, then the bonus), and `Facts` as numbers."""
        tree, start = proposal.tree, self.cache.lengths + 1  # the position of the first token that this round chooses
        found = []
        if self.rule is not None and proposal.drawn is not None:
            path, accepted, bonus, broken = self._judge(self.rule, proposal.drawn, v)
            found = [broken]
        elif v.chosen is None:
            path, accepted, bonus = walk(
                tree, lambda node, depth: self.choose(v.logits[self.index, node], start + depth)
            )
        else:
            return accept(tree, v.chosen, v.depths, proposal.stage, proposal.merged)
        said, facts = told(tree, (path, accepted, bonus), v.depths, proposal.stage, proposal.merged)
        return path, said, torch.cat([facts, *found], 1)

    def _settle(self, v: Verified, path: Tensor, said: Tensor, facts: Tensor) -> Tensor:
        """Commit what the device itself found; returns the slots of each row [B]."""
        counts_B = (facts[:, 0] + 1) * self.alive
        self._commit(v, path, said, counts_B, None)
        return counts_B

    def _judge(self, rule: Rule, drawn: Drawn, v: Verified) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Path, accepted and bonus by a rule, and the faults of the laws [B, 5]."""
        s = self.settings
        if s.temperature > 0:
            target = law(v.logits, s.temperature, s.top_k, s.top_p)
        else:
            chosen = best(v.logits).unsqueeze(2)
            target = torch.zeros_like(v.logits, dtype=drawn.laws.dtype).scatter_(2, chosen, 1.0)
        drafts = Drafts(drawn.tokens, drawn.laws, target, drawn.coins)
        return *verify(rule, drafts, drawn.ends), faults(drafts)

    def _commit(self, v: Verified, path: Tensor, said: Tensor, counts_B: Tensor, counts: list[int] | None) -> None:
        """Keep the accepted path in the target's cache; the last token said is the next root."""
        last = said.gather(1, (counts_B - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        self.roots.copy_(torch.where(counts_B > 0, last, self.roots))
        self.cache.keep(counts_B, counts, None if self.proposer.line else path)

    def _extend(self, v: Verified, path: Tensor, said: Tensor, counts_B: Tensor, counts: list[int] | None) -> None:
        """Give the drafter the target's taps of the accepted path."""
        assert self.drafting is not None
        taps = v.taps.gather(1, path.unsqueeze(2).expand(-1, -1, v.taps.shape[2]))
        self.drafting.extend(taps, said, counts_B, counts)


def rounded(slots: int) -> int:
    """Up to a multiple of 256, or of an eighth of a long context: few shapes to capture, little to read in vain."""
    unit = max(ROUNDING, 1 << max(0, slots.bit_length() - 4))
    return -(-slots // unit) * unit


class Engines:
    """Engines kept from call to call, since capturing a round takes longer than decoding a short answer. Those of one
    target and number of rows share their caches."""

    def __init__(self, fixed: bool | None = None, longest: int = 0) -> None:
        """`fixed`: whether shapes are; they are on a GPU. Caches have room for prompts of `longest` tokens from the
        start, so that no longer one makes them grow, and every step be captured anew, while the clock runs."""
        self._fixed, self._longest = fixed, longest
        self._engines: dict[tuple[Target, Drafter | None, int, Settings], Engine] = {}
        self._caches: dict[tuple[Target, int], KVCache] = {}
        self._drafting: dict[tuple[Target, Drafter, int, int], EagleDrafting | BlockDrafting] = {}

    def get(self, target: Target, drafter: Drafter | None, settings: Settings, rows: int, longest: int) -> Engine:
        """An engine for `rows` prompts of at most `longest` tokens."""
        need = max(longest, self._longest) + settings.max_new_tokens + settings.room + 1
        cache = self._caches.get((target, rows))
        if cache is None or cache.capacity < need:
            grown = 0 if cache is None else min(2 * cache.capacity, target.max_positions + settings.room)
            self._caches[target, rows] = cache = target.new_cache(rows, rounded(max(need, grown)))
            self._engines = {k: v for k, v in self._engines.items() if (k[0], k[2]) != (target, rows)}
            self._drafting = {k: v for k, v in self._drafting.items() if (k[0], k[2]) != (target, rows)}
        settings = replace(settings, max_new_tokens=0)  # which a round does not ask for
        if not settings.drafts:
            drafter = None
        key = (target, drafter, rows, settings)
        if key not in self._engines:
            drafting = None
            if drafter is not None:
                more = settings.draft_room - settings.room  # than the target's cache has
                new = (target, drafter, rows, more)
                drafting = self._drafting.get(new) or drafting_of(drafter, target, cache, more)
                self._drafting[new] = drafting
            self._engines[key] = Engine(target, settings, cache, drafting, self._fixed)
        return self._engines[key]


def teach(matrix: SuccessorMatrix, ids_BT: Tensor, final_BTH: Tensor, counts_B: Tensor, target: Target) -> None:
    """Prompts teach the matrix: the first `counts` tokens of each row, a few at a time."""
    B, T = ids_BT.shape
    real = torch.arange(T, device=ids_BT.device) < counts_B.unsqueeze(1)
    step = max(1, PREFILL_LOGITS // B)
    for start in range(0, T, step):
        part = slice(start, start + step)
        best = top(target.logits(final_BTH[:, part]), WIDTH)[1]
        matrix.update(ids_BT[:, part][real[:, part]], best[real[:, part]])


def remember(matrix: SuccessorMatrix, tree: DraftTree, path: Tensor, logits: Tensor, alive_B: Tensor) -> None:
    """Every verified node of an unfinished row teaches the matrix; for one token the accepted path wins, then the
    higher score, then the later node."""
    if logits.is_cuda:
        from models import fused_trees

        fused_trees.remember((tree.tokens, tree.scores, tree.valid), path, logits, alive_B, matrix.rows, matrix.owner)
        return
    on_path = torch.zeros_like(tree.valid).scatter(1, path, True)
    priority = tree.scores.double().clamp(-1e5, 0.0) + on_path * 1e6  # retrieved nodes score -1e9, accepted ones too
    teaches = tree.valid & alive_B.unsqueeze(1)
    order = priority.flatten().sort(stable=True).indices
    best = top(logits, WIDTH)[1].flatten(0, 1)
    matrix.update(tree.tokens.flatten()[order], best[order], teaches.flatten()[order])
