"""What the frozen target knows of a row: the drafter's inputs, and a summary of its laws where they teach.

T tokens, n states, m positions that teach some slot, H hidden, C features, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from models.target import States, Target

CHUNK = 2**25  # logits (float32) held at once where a pass over a vocabulary is cut into chunks of rows


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
    for part in final_nH.split(max(1, CHUNK // target.vocab_size)):
        logits = target.logits(part)
        best.append(logits.argmax(-1))
        lse.append(logits.to(wide).logsumexp(-1))
    return torch.cat(best), torch.cat(lse)


def read_features(target: Target, states: States, teaches_T: Tensor) -> Features:
    """Of a forward's states, as a batch of one; `teaches` is on the host."""
    teaching = teaches_T.nonzero().squeeze(-1).to(target.device, non_blocking=True)
    final_mH = states.final_BTH[0].index_select(0, teaching)
    return Features(states.taps_BTC[0], final_mH, *teacher_summary(target, final_mH))
