"""How FlexDraft proposes: groups of masks through the target's late layers, behind the committed text.

B rows, T verified tokens (the root and its drafts), L drafts, H hidden.
"""

import copy

import torch
from torch import Tensor

from models.cache import KVCache
from models.flexdraft import FlexDraft
from models.sampling import top
from models.target import States, Target


class FlexDrafting:
    """Masks read the target's cache and write nothing. `cache` has no layers: it counts what is committed, as the
    engine asks of every drafter.

    *Sequential*: the target has verified; then one group goes through the late layers alone. *Parallel* (`verify`):
    while the target verifies, a group is drafted behind every candidate, and the one behind the last accepted is kept
    for the next round; where there is none yet, as after a prompt, the round begins sequentially.
    """

    def __init__(self, drafter: FlexDraft, target: Target, text: KVCache) -> None:
        self.drafter, self.target, self.text = drafter, target, text
        drafter.pack(target)
        self.cache = KVCache(0, text.rows, 1, text.capacity, 1, target.device, target.dtype)
        self.bonus = torch.zeros(text.rows, dtype=torch.int64, device=target.device)
        size, dtype = drafter.config.block_size, target.dtype
        self.groups_BTSH = torch.zeros(text.rows, size, size, target.hidden_size, dtype=dtype, device=target.device)
        self.block_BSH = self.groups_BTSH[:, 0].clone()
        self.ready = False  # a group was drafted behind what every row has committed

    def part(self, rows: slice) -> "FlexDrafting":
        self.ready = False
        part = copy.copy(self)
        part.cache, part.bonus = self.cache.part(rows), self.bonus[rows]
        part.groups_BTSH, part.block_BSH = self.groups_BTSH[rows], self.block_BSH[rows]
        return part

    def verify(self, ids_BT: Tensor, cache: KVCache) -> States:
        """`Target.forward` of a line of candidates, and a group behind each. It gives no taps: none are read."""
        final, groups = self.drafter.verify(self.target, ids_BT, cache)
        self.groups_BTSH[:, : groups.shape[1]] = groups
        return States(final[..., :0], final)

    def extend(self, taps_BTC: Tensor, next_ids_BT: Tensor, counts_B: Tensor, counts: list[int] | None) -> None:
        self.cache.keep(counts_B, counts)
        last = (counts_B - 1).clamp(min=0)
        token = next_ids_BT.gather(1, last.unsqueeze(1)).squeeze(1)
        self.bonus.copy_(torch.where(counts_B > 0, token, self.bonus))
        row, group = torch.arange(len(last), device=last.device), last.clamp(max=self.groups_BTSH.shape[1] - 1)
        self.block_BSH.copy_(self.groups_BTSH[row, group])  # of no use until `ready`

    @torch.no_grad()
    def block(self, length: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens at masks 1 .. length and their log-probabilities [B, length]."""
        states = self.block_BSH if self.ready else self.drafter.block(self.target, self.text)
        logp, tokens = top(self.drafter.logits(self.target, states[:, 1 : 1 + length], self.bonus), 1)
        return tokens.squeeze(2), logp.squeeze(2)
