"""Batched generation by the target: a static cache, finished rows replaced, the decoding step captured on a GPU."""

from collections.abc import Callable

import torch
from torch import Tensor

from models.capture import Steps
from models.sampling import draw, law, uniforms
from models.target import Target, padded, refuse_nan

BUCKET = 128  # attention reads slots up to a multiple of this
PREFILL = 16384  # tokens, padding included


class _Slots:
    """The rows being decoded side by side. `history[b, p]` is the token at position p; a row whose cache holds n tokens
    feeds history[b, n] next."""

    def __init__(self, target: Target, rows: int, capacity: int, seed: int, sampled: bool) -> None:
        self.target, self.seed, self.sampled, device = target, seed, sampled, target.device
        self.cache = target.new_cache(rows, capacity)
        self.history = torch.zeros(rows, capacity + 1, dtype=torch.int64, device=device)
        self.prompt_index = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperature = torch.ones(rows, device=device)
        self.greedy = torch.ones(rows, dtype=torch.bool, device=device)
        self.owner: list[int | None] = [None] * rows
        self.seen = [0] * rows  # generated tokens of each row already looked at on the host
        self.started = [0] * rows  # prompt length
        self._captured = Steps(device, captures=not target.sharded)

    def admit(self, rows: list[int], indices: list[int], prompts: list[list[int]], temperatures: list[float]) -> None:
        """Prefill prompts and put them into free rows, their first new token chosen."""
        target, lengths = self.target, [len(p) for p in prompts]
        ids = padded(prompts).to(target.device)
        index, owners, heat = (torch.tensor(x, device=target.device) for x in (rows, indices, temperatures))
        cache = target.new_cache(len(prompts), max(lengths))
        states = target.prefill(ids, lengths, cache)
        self.cache.adopt(rows, cache)
        self.temperature[index], self.greedy[index] = heat.clamp(min=1e-4), heat == 0
        self.prompt_index[index] = owners
        self.history[index, : ids.shape[1]] = ids
        at = self.cache.lengths[index]
        self.history[index, at] = self._choose(refuse_nan(target.logits(states.final_BTH[:, 0])), index, at)
        for row, owner, length in zip(rows, indices, lengths, strict=True):
            self.owner[row], self.seen[row], self.started[row] = owner, 0, length

    def _choose(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        best = logits.argmax(-1)
        if not self.sampled:
            return best
        noise = uniforms(self.seed, self.prompt_index[rows], positions)
        heat = self.temperature[rows]
        if logits.is_cuda:
            from models import fused_tokens

            sampled = fused_tokens.draw(logits.contiguous(), noise, heat)
        else:
            sampled = draw(law(logits, heat.unsqueeze(1)), noise)
        return torch.where(self.greedy[rows], best, sampled)

    def _step(self) -> None:
        cache, rows = self.cache, torch.arange(len(self.owner), device=self.target.device)
        at = cache.lengths.clamp(max=cache.capacity - 1)
        states = self.target.forward(self.history[rows, at].unsqueeze(1), cache)
        cache.lengths += 1
        chosen = self._choose(self.target.logits(states.final_BTH[:, 0]), rows, cache.lengths)
        self.history[rows, (at + 1)] = chosen

    def steps(self, count: int) -> None:
        cache = self.cache
        if self._captured.captures:
            # the fused kernels read what is there, whatever the bucket
            reach = cache.capacity if self.target.kernels else (cache.high + count + BUCKET) // BUCKET * BUCKET
            cache.bucket = min(cache.capacity, reach)
            for _ in range(count):
                self._captured.run(cache.bucket, self._step)
            cache.note([count] * cache.rows)
            return
        for _ in range(count):
            self._step()
            cache.note([1] * cache.rows)

    def retire(self, row: int) -> None:
        self.owner[row] = None
        self.cache.lengths[row] = 0
        self.cache.host[row] = 0


@torch.no_grad()
def generate(
    target: Target,
    prompts: list[list[int]],
    *,
    max_new_tokens: int | list[int],
    temperatures: list[float],
    slots: int,
    seed: int,
    stop_ids: frozenset[int],
    progress: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """The target's continuation of each prompt, end token included when it came; `progress(prompts done, new tokens)`.

    Prompts are taken in order of length, so that rows decoded together read about as many slots. Greedy where a
    temperature is 0. The noise of a sampled row depends on (seed, its index, position) alone.
    """
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    outputs: list[list[int]] = [[] for _ in prompts]
    waiting = sorted((i for i in range(len(prompts)) if limits[i] > 0), key=lambda i: -len(prompts[i]))
    if not waiting:
        return outputs
    rows = min(slots, len(waiting))
    burst = 16 if target.device.type == "cuda" else 1
    capacity = max(len(p) + n for p, n in zip(prompts, limits, strict=True)) + burst + 1
    capacity = -(-capacity // BUCKET) * BUCKET
    state = _Slots(target, rows, capacity, seed, any(t > 0 for t in temperatures))
    done = 0
    while waiting or any(owner is not None for owner in state.owner):
        free = [row for row, owner in enumerate(state.owner) if owner is None]
        if waiting and (len(free) >= max(1, rows // 8) or len(free) == rows):
            while free and waiting:
                batch = _together(waiting, prompts, len(free))
                into, free = free[: len(batch)], free[len(batch) :]
                state.admit(into, batch, [prompts[i] for i in batch], [temperatures[i] for i in batch])
        else:
            state.steps(burst)
        done += _harvest(state, outputs, limits, stop_ids)
        if progress is not None:
            progress(done, sum(map(len, outputs)))
    return outputs


def _together(waiting: list[int], prompts: list[list[int]], most: int) -> list[int]:
    """Prompts of one prefill, off the end of `waiting`, where the shortest are.

    Padded they hold at most PREFILL tokens (or are one prompt). None is more than twice as long as the first, so that
    less than half of the work is padding.
    """
    batch = [waiting.pop()]
    shortest = len(prompts[batch[0]])
    while waiting and len(batch) < most:
        length = len(prompts[waiting[-1]])
        if length > 2 * shortest or (len(batch) + 1) * length > PREFILL:
            break
        batch.append(waiting.pop())
    return batch


def _harvest(state: _Slots, outputs: list[list[int]], limits: list[int], stop_ids: frozenset[int]) -> int:
    """Read the new tokens on the host, end rows that stopped; returns how many ended."""
    active = [row for row, owner in enumerate(state.owner) if owner is not None]
    if not active:
        return 0
    starts = [state.started[row] + state.seen[row] for row in active]
    ends = [state.cache.host[row] + 1 for row in active]
    width = max(e - s for s, e in zip(starts, ends, strict=True))
    index = torch.tensor(starts, device=state.history.device).unsqueeze(1) + torch.arange(
        width, device=state.history.device
    )
    rows = torch.tensor(active, device=state.history.device).unsqueeze(1)
    fresh = state.history[rows, index.clamp(max=state.history.shape[1] - 1)].tolist()
    ended = 0
    for row, start, end, tokens in zip(active, starts, ends, fresh, strict=True):
        owner = state.owner[row]
        assert owner is not None
        for token in tokens[: end - start]:
            outputs[owner].append(token)
            if token in stop_ids or len(outputs[owner]) >= limits[owner]:
                state.retire(row)
                ended += 1
                break
        else:
            state.seen[row] = end - state.started[row]
    return ended
