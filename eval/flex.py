"""How FlexDraft proposes: a group of masks through the target's late layers, behind the committed text."""

import copy

import torch
from torch import Tensor

from models.cache import KVCache
from models.flexdraft import FlexDraft
from models.sampling import top
from models.target import Target


class FlexDrafting:
    """The sequential mode: the target has verified and its cache holds what was accepted; then one group is drafted.

    Masks read the target's cache and write nothing. `cache` has no layers: it counts what is committed, as the engine
    asks of every drafter.
    """

    def __init__(self, drafter: FlexDraft, target: Target, text: KVCache) -> None:
        self.drafter, self.target, self.text = drafter, target, text
        self.cache = KVCache(0, text.rows, 1, text.capacity, 1, target.device, target.dtype)
        self.bonus = torch.zeros(text.rows, dtype=torch.int64, device=target.device)

    def part(self, rows: slice) -> "FlexDrafting":
        part = copy.copy(self)
        part.cache, part.bonus = self.cache.part(rows), self.bonus[rows]
        return part

    def extend(self, taps_BTC: Tensor, next_ids_BT: Tensor, counts_B: Tensor, counts: list[int] | None) -> None:
        self.cache.keep(counts_B, counts)
        last = next_ids_BT.gather(1, (counts_B - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        self.bonus.copy_(torch.where(counts_B > 0, last, self.bonus))

    @torch.no_grad()
    def block(self, length: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens at masks 1 .. length and their log-probabilities [B, length]."""
        states = self.drafter.block(self.target, self.text)[:, 1 : 1 + length]
        logp, tokens = top(self.drafter.logits(self.target, states, self.bonus), 1)
        return tokens.squeeze(2), logp.squeeze(2)
