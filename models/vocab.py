"""The draft vocabulary: which target tokens a drafter can say."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipes.schema import UserError


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


def write_vocab(vocab: VocabMap, path: Path) -> None:
    save_file({"d2t": vocab.d2t.cpu(), "t2d": vocab.t2d.cpu()}, path)


def read_vocab(path: Path) -> VocabMap:
    """Raises UserError for a file that holds no whole map: d2t and t2d must say the same."""
    try:
        tensors = load_file(path)
        d2t, t2d = tensors["d2t"], tensors["t2d"]
        vocab = VocabMap.from_ids(d2t + torch.arange(len(d2t)), len(t2d))
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise UserError(f"{path}: no vocabulary map can be read: {error}. Delete its folder and run again.") from error
    if not torch.equal(vocab.d2t, d2t) or not torch.equal(vocab.t2d, t2d):
        raise UserError(f"{path}: damaged vocabulary map: d2t and t2d differ. Delete its folder and run again.")
    return vocab


def refuse_other_vocab(vocab: VocabMap, path: Path) -> None:
    """UserError when the map at `path` is another one than `vocab`."""
    stored = read_vocab(path)
    if stored.hash() != vocab.hash():
        raise UserError(
            f"{path} holds another vocabulary map ({stored.size} of {len(stored.t2d)} tokens, hash "
            f"{stored.hash()[:12]}) than the prepared data ({vocab.size} of {len(vocab.t2d)}, {vocab.hash()[:12]}): a "
            "drafter speaks the one it was trained with. Go on with those data, or start another run with run_dir=DIR."
        )
