"""Features of packed micro-batches: from the frozen target as they are asked for, or from what it left on disk.

T tokens, m positions that teach some slot, H hidden, C features.
"""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch
from torch import Tensor

from data_prep.state_store import StateStore, Stored
from data_prep.teacher import Features, read_features
from models.attention import Documents
from models.packed import PackedForward
from models.target import Target
from train.batches import Batch, Pack

Found = TypeVar("Found")


class Keeping(Generic[Found]):
    """What was made, kept by key over the epochs: first come first kept, up to `room` bytes."""

    def __init__(self, room: int) -> None:
        self.room, self.kept = room, dict[Hashable, Found]()

    def get(self, key: Hashable, make: Callable[[], Found], size: Callable[[Found], int]) -> Found:
        if key in self.kept:
            return self.kept[key]
        found = make()
        if size(found) <= self.room:
            self.room -= size(found)
            self.kept[key] = found
        return found


class Teacher:
    """Features of micro-batches: of a packed row at once, or of each document alone where they are to be kept.

    Alone, a document's features do not depend on its neighbours, so whether they were kept over the epochs (first come
    first kept, up to `keep_bytes`) or are computed again changes no bit.
    """

    computes = True  # whether the target runs

    def __init__(self, target: Target, keep_bytes: int = 0) -> None:
        self.target, self.keeps, self.keeping = target, keep_bytes > 0, Keeping[Features](keep_bytes)
        self.forward = PackedForward(target, fills=False if self.keeps else None)  # alone, most rows are short

    def ahead(self, packs: Sequence[Pack]) -> None:
        """The packs of rows of the next optimiser step: a teacher that reads from disk begins to."""

    def arrive(self, packs: Sequence[Pack]) -> None:
        """Wait until what is read from disk of these packs is there."""

    @torch.no_grad()
    def features(self, batch: Batch, teaches_T: Tensor, documents: Documents) -> Features:
        """`batch` and `teaches` (the positions that teach some slot) are on the host."""
        ids_T = batch.ids_T
        if not self.keeps:
            states, _ = self.forward.read(ids_T, documents)
            return read_features(self.target, states, teaches_T)
        parts = [self._document(ids_T[span], teaches_T[span]) for span in documents.spans]
        return Features(*(torch.cat(of_all) for of_all in zip(*parts, strict=True)))

    def _document(self, ids_T: Tensor, teaches_T: Tensor) -> Features:
        def make() -> Features:
            states = self.target.features(ids_T.unsqueeze(0).to(self.target.device))
            return read_features(self.target, states, teaches_T)

        key = (ids_T.numpy().tobytes(), teaches_T.numpy().tobytes())
        return self.keeping.get(key, make, lambda found: sum(t.nbytes for t in found))


class StoredTeacher(Teacher):
    """Features from a store (data_prep/state_store.py), read by a thread while the step before trains."""

    computes = False

    def __init__(self, target: Target, store: StateStore) -> None:
        super().__init__(target)
        self.store = store
        self.thread = ThreadPoolExecutor(1, "states")
        self.coming: dict[tuple[int, ...], Future[Stored]] = {}

    def ahead(self, packs: Sequence[Pack]) -> None:
        """What was read and not asked for goes."""
        self.coming = {tuple(pack): self.thread.submit(self._read, pack) for pack in packs if pack}

    def arrive(self, packs: Sequence[Pack]) -> None:
        for pack in filter(None, packs):
            if tuple(pack) not in self.coming:  # of a run's first step
                self.coming[tuple(pack)] = self.thread.submit(self._read, pack)
            self.coming[tuple(pack)].result()

    @torch.no_grad()
    def features(self, batch: Batch, teaches_T: Tensor, documents: Documents) -> Features:
        key = tuple(batch.rows)
        if not key:  # a rank without rows
            return self._blank(len(batch.ids_T), int(teaches_T.sum()))
        found = self.coming.pop(key).result() if key in self.coming else self._read(batch.rows)
        features, m = found.features(self.target.device, self.store.layout.dtype), int(teaches_T.sum())
        if len(found.best_m) == 0:
            return self._blank(len(batch.ids_T), m)._replace(taps_TC=features.taps_TC)
        assert len(found.best_m) == m, "what teaches follows from the answer marks alone"
        return features

    def _read(self, pack: Sequence[int]) -> Stored:
        found = self.store.read(pack)
        if self.target.device.type != "cuda":
            return found
        with torch.cuda.device(self.target.device):  # a thread's own is the first card
            return found.pinned()

    def _blank(self, T: int, m: int) -> Features:
        """Where nothing teaches: finite, and the objective's weight for it is zero."""
        layout, device = self.store.layout, self.target.device
        taps_TC = torch.zeros(T, len(layout.taps) * layout.hidden, dtype=layout.dtype, device=device)
        final_mH = taps_TC.new_zeros(m, layout.hidden)
        best_m = torch.zeros(m, dtype=torch.int64, device=device)
        return Features(taps_TC, final_mH, best_m, torch.zeros(m, device=device))
