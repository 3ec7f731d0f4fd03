"""What the frozen target says about a packed micro-batch: the inputs of a drafter, and what its teacher knows.

T tokens, m positions that teach some slot, H hidden, C features.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from models.attention import Documents
from models.target import Target

CHUNK = 2**25  # logits (float32) held at once where a pass over a vocabulary is cut into chunks of rows


class Features(NamedTuple):
    taps_TC: Tensor
    final_mH: Tensor  # final normed states of the teaching positions
    best_m: Tensor  # the target's arg-max there, in its own vocabulary


def teacher_best(target: Target, final_nH: Tensor) -> Tensor:
    """The target's arg-max over its full vocabulary [n], a chunk of rows at a time: [n, V] never exists."""
    rows = max(1, CHUNK // target.vocab_size)
    best = [target.logits(part).argmax(-1) for part in final_nH.split(rows) if len(part)]
    return torch.cat([final_nH.new_empty(0, dtype=torch.int64), *best])


def by_document(target: Target) -> bool:
    return target.device.type == "cpu"


class Teacher:
    """Features of micro-batches. A GPU runs a packed row at once.

    A CPU runs it document by document, which takes no longer there: a document's features then do not depend on its
    neighbours, so that keeping them over the epochs, up to `keep_bytes` and first come first kept, changes no number.
    """

    def __init__(self, target: Target, keep_bytes: int = 0) -> None:
        self.target, self.room = target, keep_bytes
        self.kept: dict[tuple[bytes, bytes], Features] = {}

    @torch.no_grad()
    def features(self, ids_T: Tensor, teaches_T: Tensor, documents: Documents) -> Features:
        """`ids` and `teaches` (the positions that teach some slot, at least one) are on the host."""
        if not by_document(self.target):
            states = self.target.packed_features(ids_T.to(self.target.device, non_blocking=True), documents)
            teaching = teaches_T.nonzero().squeeze(-1).to(self.target.device, non_blocking=True)
            final_mH = states.final_BTH[0].index_select(0, teaching)
            return Features(states.taps_BTC[0], final_mH, teacher_best(self.target, final_mH))
        parts = [self._document(ids_T[span], teaches_T[span]) for span in documents.spans]
        return Features(*(torch.cat(of_all) for of_all in zip(*parts, strict=True)))

    def _document(self, ids_T: Tensor, teaches_T: Tensor) -> Features:
        key = (ids_T.numpy().tobytes(), teaches_T.numpy().tobytes())
        if key in self.kept:
            return self.kept[key]
        states = self.target.features(ids_T.unsqueeze(0))
        final_mH = states.final_BTH[0, teaches_T]
        found = Features(states.taps_BTC[0], final_mH, teacher_best(self.target, final_mH))
        size = sum(t.nbytes for t in found)
        if size <= self.room:
            self.room -= size
            self.kept[key] = found
        return found
