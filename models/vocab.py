"""The draft vocabulary: which target tokens a drafter can say."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class VocabMap:
    """`d2t` [Vd] int64 holds *offsets* (target id = i + d2t[i], as engines read it); `t2d` [V] bool marks kept ids."""

    d2t: Tensor
    t2d: Tensor

    @staticmethod
    def from_ids(kept: list[int] | Tensor, vocab_size: int) -> "VocabMap":
        ids = torch.as_tensor(kept, dtype=torch.int64).unique(sorted=True)
        if len(ids) == 0 or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
            raise ValueError(f"kept ids must lie in 0..{vocab_size - 1}")
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[ids] = True
        return VocabMap(ids - torch.arange(len(ids)), t2d)

    @staticmethod
    def identity(vocab_size: int) -> "VocabMap":
        return VocabMap.from_ids(torch.arange(vocab_size), vocab_size)

    @property
    def size(self) -> int:
        return len(self.d2t)

    @property
    def full(self) -> bool:
        return self.size == len(self.t2d)

    @property
    def kept_ids(self) -> Tensor:
        """Target ids in draft order, ascending, [Vd]."""
        return self.d2t + torch.arange(self.size, device=self.d2t.device)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + self.d2t[draft_ids]

    def to_draft(self, target_ids: Tensor) -> Tensor:
        """Draft ids, -1 where the token is not kept."""
        rank = self.t2d.cumsum(0) - 1
        return torch.where(self.t2d[target_ids], rank[target_ids], -1)

    def to(self, device: torch.device) -> "VocabMap":
        return VocabMap(self.d2t.to(device), self.t2d.to(device))

    def hash(self) -> str:
        return hashlib.sha256(self.kept_ids.cpu().numpy().tobytes() + str(len(self.t2d)).encode()).hexdigest()
