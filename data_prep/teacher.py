"""What the frozen target knows of a row: the drafter's inputs, and a summary of its laws where they teach.

T tokens, n states, m positions that teach some slot, H hidden, C features, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from models.attention import sent
from models.sampling import best_and_mass
from models.target import States, Target

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


def read_features(target: Target, states: States, teaches_T: Tensor) -> Features:
    """Of a forward's states, as a batch of one; `teaches` is on the host."""
    teaching = sent(teaches_T.nonzero().squeeze(-1), target.device)
    final_mH = states.final_BTH[0].index_select(0, teaching)
    return Features(states.taps_BTC[0], final_mH, *teacher_summary(target, final_mH))
