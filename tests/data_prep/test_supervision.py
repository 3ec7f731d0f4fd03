"""The supervision contract, against its wording."""

from itertools import product

import torch

from data_prep.supervision import encode_generated, supervised


def slow_supervised(answer: list[int], steps: int) -> list[list[bool]]:
    """Word for word: slot p is supervised at step i iff x[p+1 .. p+2+i] exist and all lie in the same answer."""
    out = []
    for i in range(steps):
        line = []
        for p in range(len(answer)):
            needed = range(p + 1, p + 2 + i + 1)
            inside = needed[-1] < len(answer)
            line.append(inside and answer[p + 1] != 0 and all(answer[q] == answer[p + 1] for q in needed))
        out.append(line)
    return out


def test_supervised_hand_made_dialogue() -> None:
    # x:               user user  A   A   A  end user user
    answer = torch.tensor([0, 0, 1, 1, 1, 1, 0, 0])
    slots = supervised(answer, 4)
    # the first useful slot is the last of the prompt; the last predicts the end token
    assert [s.nonzero().flatten().tolist() for s in slots] == [[1, 2, 3], [1, 2], [1], []]


def test_supervised_exhaustively() -> None:
    for length in range(1, 8):
        for answer in product((0, 1, 2), repeat=length):
            assert supervised(torch.tensor(answer), 4).tolist() == slow_supervised(list(answer), 4)


def test_supervised_batch_is_its_rows_and_nested() -> None:
    answer = torch.randint(0, 3, (5, 40), generator=torch.Generator().manual_seed(0)).repeat_interleave(3, dim=1)
    slots = supervised(answer, 7)
    assert slots.shape == (7, 5, 120)
    for b in range(5):
        assert torch.equal(slots[:, b], supervised(answer[b], 7))
    assert not (slots[1:] & ~slots[:-1]).any()


def test_encode_generated_keeps_the_tokens() -> None:
    ids, marks = encode_generated([5, 6], [7, 8, 1])
    assert (ids, marks) == ([5, 6, 7, 8, 1], [0, 0, 1, 1, 1])
    assert encode_generated([*ids, 9], [3, 1], [*marks, 0]) == ([*ids, 9, 3, 1], [*marks, 0, 2, 2])
