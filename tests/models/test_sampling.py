"""The law against transformers' warpers; draws; noise that belongs to a row and a position."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from models.sampling import draw, law, uniforms


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.4, 1e-6])
def test_the_law_is_that_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(16, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2
    scores = TemperatureLogitsWarper(temperature)(None, logits) if temperature != 1 else logits
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    ours = law(logits, temperature, top_k, top_p)
    torch.testing.assert_close(ours, scores.softmax(-1))
    assert torch.equal(ours > 0, scores > float("-inf"))


def test_temperatures_may_differ_by_row() -> None:
    logits = torch.randn(2, 3, 7)
    ours = law(logits, torch.tensor([[[0.5]], [[2.0]]]))
    torch.testing.assert_close(ours[0], law(logits[0], 0.5))
    torch.testing.assert_close(ours[1], law(logits[1], 2.0))


def test_half_precision_logits_give_a_law_in_fp32() -> None:
    assert law(torch.randn(5).bfloat16(), 1.0).dtype == torch.float32


def test_draw_inverts_the_cumulative_law() -> None:
    p = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    points = torch.tensor([0.0, 0.2, 0.2499, 0.2501, 0.7, 0.7501, 0.999999, 1.0], dtype=torch.float64)
    assert draw(p.expand(8, 6), points).tolist() == [1, 1, 1, 3, 3, 4, 4, 4]


def test_a_token_without_mass_is_never_drawn() -> None:
    torch.manual_seed(0)
    p = law(torch.randn(2000, 40), 1.0, top_k=3)
    for edge in (1e-16, 0.5, 1 - 1e-16):
        drawn = draw(p, torch.full((2000,), edge, dtype=torch.float64))
        assert (p.gather(1, drawn.unsqueeze(1)) > 0).all()


def test_frequencies_of_draws() -> None:
    p = torch.tensor([0.05, 0.0, 0.4, 0.3, 0.25])
    n = 40000
    noise = uniforms(7, torch.arange(n), torch.zeros(n, dtype=torch.int64))
    counts = torch.bincount(draw(p.expand(n, 5), noise), minlength=5)
    assert counts[1] == 0
    assert ((counts - n * p).abs() < 4 * (n * p * (1 - p)).sqrt() + 1).all()


def test_noise_is_uniform_and_uncorrelated() -> None:
    rows, positions = torch.arange(400).repeat_interleave(250), torch.arange(250).repeat(400)
    u = uniforms(3, rows, positions)
    assert u.dtype == torch.float64 and float(u.min()) > 0 and float(u.max()) < 1
    assert len(u.unique()) == len(u)
    bins = torch.histc(u, 100, 0, 1)
    assert float(((bins - 1000) ** 2 / 1000).sum()) < 149  # chi-square of 99 degrees at 1e-3
    table = u.view(400, 250)
    for one, other in (
        (table[:, 1:], table[:, :-1]),
        (table[1:], table[:-1]),
        (table, uniforms(4, rows, positions).view(400, 250)),
    ):
        pair = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
        assert abs(float(pair)) < 0.015


def test_noise_has_no_order_and_no_state() -> None:
    rows, positions = torch.tensor([9, 2, 9, 4]), torch.tensor([1, 1, 0, 7])
    together = uniforms(5, rows, positions)
    for i in (3, 0, 2, 1):
        assert uniforms(5, rows[i : i + 1], positions[i : i + 1])[0] == together[i]
    assert len(set(together.tolist())) == 4


def test_row_names_may_be_large() -> None:
    names = torch.tensor([2**32 - 1, 2**32 - 2, 2**31])
    u = uniforms(2**31, names, torch.tensor([5, 5, 5]))
    assert len(set(u.tolist())) == 3 and bool(((u > 0) & (u < 1)).all())
