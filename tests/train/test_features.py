"""The teacher's summary of a vocabulary, against the logits of all positions at once."""

import pytest
import torch

from data_prep import teacher
from data_prep.teacher import teacher_summary
from models.target import Target


@pytest.mark.parametrize("chunk", [1, 700, 2**25])
def test_arg_max_and_log_sum_exp_are_those_of_the_whole_logits(
    target: Target, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(teacher, "CHUNK", chunk)
    final_nH = torch.randn(9, target.hidden_size, generator=torch.Generator().manual_seed(1)) * 3
    best_n, lse_n = teacher_summary(target, final_nH)
    logits = target.logits(final_nH)
    assert torch.equal(best_n, logits.argmax(-1))
    assert lse_n.dtype == torch.float32
    torch.testing.assert_close(lse_n, logits.double().exp().sum(-1).log().float())
    best_n, lse_n = teacher_summary(target, final_nH[:0])
    assert best_n.shape == lse_n.shape == (0,)
