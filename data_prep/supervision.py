"""Which tokens are answers, and which drafter slots are supervised by them.

Shapes: T positions of a row, B rows, i unroll step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def supervised(answer: Tensor, steps: int) -> Tensor:
    """bool [steps, ..., T]: slot p is supervised at unroll step i iff x[p+1 .. p+2+i] all lie in one answer.

    answer: integer [..., T], 0 = not an answer, k = k-th answer of its row, end token included. Slot p sees the
    features of x[0..p] and the embedding of x[p+1] and predicts x[p+2]; step i predicts x[p+2+i] and has been fed
    x[p+1 .. p+1+i], all of which the drafter gets at serving time only inside one answer. Nested in i.
    """
    length = answer.shape[-1]
    # joined[p] = x[p] and x[p+1] lie in one answer; padded so that every shift below stays inside
    joined = torch.zeros(*answer.shape[:-1], length + steps + 1, dtype=torch.bool, device=answer.device)
    if length > 1:
        joined[..., : length - 1] = (answer[..., :-1] == answer[..., 1:]) & (answer[..., :-1] != 0)
    slots = torch.ones_like(answer, dtype=torch.bool)
    out = []
    for i in range(steps):
        slots = slots & joined[..., 1 + i : 1 + i + length]
        out.append(slots)
    return torch.stack(out)


def teaching(answer: Tensor) -> Tensor:
    """bool [..., T]: the positions whose law teaches some slot, at whatever unroll step.

    Position q = p + 1 + i teaches slot p at step i, which asks for x[q-i .. q+1] in one answer: of all steps the first
    asks for least, so what it teaches is all.
    """
    return torch.cat([torch.zeros_like(answer[..., :1], dtype=torch.bool), supervised(answer, 1)[0, ..., :-1]], -1)


def encode_generated(
    prompt: Sequence[int], answer: Sequence[int], prompt_answers: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """A row (ids, answer) of a prompt and the very tokens that the target generated; nothing is tokenised again.

    `prompt_answers` marks the answers that the prompt already holds, when the dialogue has earlier turns.
    """
    marks = list(prompt_answers) if prompt_answers is not None else [0] * len(prompt)
    assert len(marks) == len(prompt)
    number = max(marks, default=0) + 1
    return [*prompt, *answer], [*marks, *[number] * len(answer)]
