"""What the frozen target says about a packed micro-batch: the inputs of a drafter, and what its teacher knows.

T tokens, m positions that teach some slot, H hidden, C features.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from models.attention import Documents
from models.target import States, Target
from train.losses import best_and_mass

# logits held at once where a pass over a vocabulary is cut into chunks of rows
CHUNK = 2**25
CHUNK_GPU = 2**28  # half a GiB in bf16: a product of fewer rows would wait for the head's weight


class Features(NamedTuple):
    taps_TC: Tensor
    final_mH: Tensor  # final normed states of the teaching positions
    best_m: Tensor  # the target's arg-max there, in its own vocabulary
    lse_m: Tensor  # the log-sum-exp of its logits there, over its full vocabulary; float32 or wider


def teacher_summary(target: Target, final_nH: Tensor) -> tuple[Tensor, Tensor]:
    """Arg-max and log-sum-exp of the target's logits over its full vocabulary [n], [n], a chunk of rows at a time:
    [n, V] never exists."""
    wide = torch.promote_types(final_nH.dtype, torch.float32)
    best, lse = [final_nH.new_empty(0, dtype=torch.int64)], [final_nH.new_empty(0, dtype=wide)]
    for part in final_nH.split(chunk_rows(target.vocab_size, final_nH.device)):
        of_part = best_and_mass(target.logits(part))
        best.append(of_part[0])
        lse.append(of_part[1])
    return torch.cat(best), torch.cat(lse)


def chunk_rows(vocab: int, device: torch.device) -> int:
    return max(1, (CHUNK_GPU if device.type == "cuda" else CHUNK) // vocab)


class Teacher:
    """Features of micro-batches: of a packed row at once, or of each document alone where they are to be kept.

    Alone, a document's features do not depend on its neighbours, so whether they were kept over the epochs (first come
    first kept, up to `keep_bytes`) or are computed again changes no bit.
    """

    def __init__(self, target: Target, keep_bytes: int = 0) -> None:
        self.target, self.keeps, self.room = target, keep_bytes > 0, keep_bytes
        self.kept: dict[tuple[bytes, bytes], Features] = {}

    @torch.no_grad()
    def features(self, ids_T: Tensor, teaches_T: Tensor, documents: Documents) -> Features:
        """`ids` and `teaches` (the positions that teach some slot) are on the host."""
        if not self.keeps:
            ids_T = ids_T.to(self.target.device, non_blocking=True)
            return self._read(self.target.packed_features(ids_T, documents), teaches_T)
        parts = [self._document(ids_T[span], teaches_T[span]) for span in documents.spans]
        return Features(*(torch.cat(of_all) for of_all in zip(*parts, strict=True)))

    def _document(self, ids_T: Tensor, teaches_T: Tensor) -> Features:
        key = (ids_T.numpy().tobytes(), teaches_T.numpy().tobytes())
        if key in self.kept:
            return self.kept[key]
        found = self._read(self.target.features(ids_T.unsqueeze(0).to(self.target.device)), teaches_T)
        size = sum(t.nbytes for t in found)
        if size <= self.room:
            self.room -= size
            self.kept[key] = found
        return found

    def _read(self, states: States, teaches_T: Tensor) -> Features:
        teaching = teaches_T.nonzero().squeeze(-1).to(self.target.device, non_blocking=True)
        final_mH = states.final_BTH[0].index_select(0, teaching)
        return Features(states.taps_BTC[0], final_mH, *teacher_summary(self.target, final_mH))
