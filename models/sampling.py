"""Laws and draws: the target's distribution at a temperature, and noise that belongs to a row and a position.

Because the noise of (seed, row, position) is the same whatever else is decoded beside it, a sampled output does not
depend on batching, and a lossless decoder gives the very tokens that plain decoding gives.
"""

import torch
from torch import Tensor

_MIX = (0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64))  # MurmurHash3's 64-bit finaliser, as int64


def uniforms(seed: int, rows: Tensor, positions: Tensor) -> Tensor:
    """float64 in (0, 1) for each (row, position) pair; a counter-based hash, so no state and no order."""
    offset = (seed * 0x1B873593 + 1 + (1 << 63)) % (1 << 64) - (1 << 63)  # wrapped, so that any seed will do
    if positions.is_cuda:
        from models import fused_tokens

        return fused_tokens.uniforms(offset, *torch.broadcast_tensors(rows, positions))
    x = rows.to(torch.int64) * 0x9E3779B97F4A7C1 + positions.to(torch.int64) * 0x2545F4914F6CDD1 + offset
    for multiplier in _MIX:
        x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * multiplier
    x = x ^ ((x >> 33) & 0x7FFFFFFF)
    return ((x >> 11) & ((1 << 53) - 1)).to(torch.float64).add(0.5) / float(1 << 53)


def law(logits: Tensor, temperature: float | Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """The sampling distribution [..., V]: temperature, then top-k, then top-p (the smallest set that reaches p)."""
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if top_k > 0:
        threshold = scaled.topk(min(top_k, scaled.shape[-1]), -1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < threshold, float("-inf"))
    probabilities = scaled.softmax(-1)
    if top_p < 1.0:
        ordered, index = probabilities.sort(dim=-1, descending=True, stable=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p
        kept = torch.zeros_like(probabilities).scatter(-1, index, ordered.masked_fill(beyond, 0.0))
        probabilities = kept / kept.sum(-1, keepdim=True)
    return probabilities


def top(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities (fp32 or wider) and indices of the k likeliest, best first: [..., V] -> [..., min(k, V)]."""
    k = min(k, logits.shape[-1])
    if logits.is_cuda:
        from models import fused_tokens

        best, index, total = fused_tokens.top(logits.contiguous(), k)
        return best - total.unsqueeze(-1), index
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    found = wide.topk(k, -1)
    return found.values - wide.logsumexp(-1, keepdim=True), found.indices


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw in token-id order: [..., V], [...] -> [...]."""
    cumulative = probabilities.to(torch.promote_types(probabilities.dtype, torch.float32)).cumsum(-1)
    point = uniform.to(cumulative.dtype).unsqueeze(-1) * cumulative[..., -1:]
    index = torch.searchsorted(cumulative, point, right=True).squeeze(-1)
    # rounding can land past the last token that has mass: step back to it
    last = cumulative.shape[-1] - 1 - (probabilities > 0).flip(-1).to(torch.uint8).argmax(-1)
    return torch.minimum(index, last)


def best(logits: Tensor) -> Tensor:
    """The arg-max, of equal ones the first: [..., V] -> [...]."""
    if logits.is_cuda and logits.dtype != torch.float64:
        from models import fused_tokens

        return fused_tokens.top(logits.contiguous(), 1)[1].squeeze(-1)
    return logits.argmax(-1)


def sample(logits: Tensor, temperature: float, top_k: int, top_p: float, uniform: Tensor) -> Tensor:
    """The token that `uniform` draws from the law of `logits`, at temperature 0 the arg-max: [..., V] -> [...]."""
    if temperature == 0:
        return best(logits)
    if logits.is_cuda and top_k == 0 and top_p >= 1:
        from models import fused_tokens

        return fused_tokens.draw(logits.contiguous(), uniform, temperature)
    return draw(law(logits.double(), temperature, top_k, top_p), uniform)


def draw_rows(laws_BRV: Tensor, rows_BK: Tensor, uniforms_BK: Tensor) -> Tensor:
    """A token of each of the laws `rows`, by inverse CDF in float64 [B, K]."""
    if laws_BRV.is_cuda:
        from models import fused_tokens

        return fused_tokens.draw_rows(laws_BRV, rows_BK, uniforms_BK)
    return draw(laws_BRV.double().gather(1, rows_BK.unsqueeze(2).expand(-1, -1, laws_BRV.shape[2])), uniforms_BK)


def best_and_mass(logits_nV: Tensor) -> tuple[Tensor, Tensor]:
    """Arg-max and log-sum-exp of each row; the latter in float32 or wider."""
    if logits_nV.is_cuda and logits_nV.dtype != torch.float64:
        from models import fused_tokens

        return fused_tokens.best_and_mass(logits_nV)
    return logits_nV.argmax(-1), logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32)).logsumexp(-1)
