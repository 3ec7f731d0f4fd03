"""Which tokens are answers, and which drafter slots are supervised by them.

Shapes: T positions of a row, B rows, i unroll step.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data_prep.template import Message, edges, render
from recipes.schema import UserError


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


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], args: Mapping[str, Any]
) -> tuple[list[int], list[int]]:
    """A row (ids, answer) of a written conversation, the spans of its answers read from the template itself.

    An answer runs from the end of the generation prompt before it to its end-of-turn token, that token included.
    The conversation is tokenised once; anything that makes a span doubtful is refused with the rendered text.
    """
    if not tokenizer.is_fast:
        raise UserError("the target's tokenizer is not a fast one, so it gives no offsets. Use a fast tokenizer.")
    text = render(tokenizer, messages, args)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = [int(i) for i in encoded["input_ids"]]
    covers = _covers(tokenizer, text, ids, encoded["offset_mapping"])
    ends = edges(tokenizer, "assistant", args).end_ids
    if not ends:
        raise _refusal("its chat template ends an answer with ordinary text, not with a token of its own", text)
    marks = [0] * len(ids)
    number = 0
    for j, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        number += 1
        opening = render(tokenizer, messages[:j], args, generation=True)
        through = render(tokenizer, messages[: j + 1], args)
        if not text.startswith(opening) or not text.startswith(through):
            raise _refusal(f"turn {j + 1} is rendered otherwise once more turns follow", text)
        first = _token_at(covers, len(opening), text)
        last = _token_at(covers, len(through), text)
        inside = [k for k in range(first, last) if ids[k] in ends]
        if not inside:
            raise _refusal(f"no end-of-turn token follows turn {j + 1}", text)
        marks[first : inside[-1] + 1] = [number] * (inside[-1] + 1 - first)
    return ids, marks


def _covers(
    tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int], offsets: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The characters that each token stands for. Some tokenizers trim the leading space of a token from its offsets."""
    covers = []
    end = 0
    for token, (start, stop) in zip(ids, offsets, strict=True):
        gap = text[end:start]
        if gap and gap.isspace() and len(tokenizer.decode([token])) > stop - start:
            start = end
        covers.append((start, stop))
        end = max(end, stop)
    return covers


def _token_at(covers: list[tuple[int, int]], edge: int, text: str) -> int:
    """Index of the first token at or after a character; refused when a token stands on both sides of it."""
    index = bisect_left(covers, edge, key=lambda cover: cover[0])
    if index and covers[index - 1][1] > edge:
        start, stop = covers[index - 1]
        raise _refusal(f"the token {text[start:stop]!r} stands on both sides of the edge of an answer", text)
    return index


def _refusal(why: str, text: str) -> UserError:
    return UserError(f"cannot tell the answers of this conversation apart: {why}. Rendered conversation:\n{text}")
