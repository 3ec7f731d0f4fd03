"""Sampled drafts: K paths drawn independently from a drafter, with the whole law that each token was drawn from.

B rows, K paths, L drafted tokens, M = 1 + (L - 1) K inner nodes, numbered as in eval.verify.Drafts, V vocabulary, Vd
draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eval.drafting import EagleDrafting
from models.sampling import draw_rows, law


@dataclass(frozen=True)
class Drawn:
    """tokens [B, K, L]; `laws` [B, M, V] of each inner node, empty where no rule asks for them; and the uniforms that
    are left for the verifier, a coin for each token [B, K, L] and two for the end of the round [B, 2]."""

    tokens: Tensor
    laws: Tensor
    coins: Tensor
    ends: Tensor


@torch.no_grad()
def draw_paths(
    drafting: EagleDrafting, uniforms_BKL: Tensor, temperature: float, top_p: float, laws_BMV: Tensor
) -> Tensor:
    """K paths of L tokens [B, K, L]. Their laws go to the places of `laws` that the draft vocabulary has; the others
    are left as they are, 0. Paths that begin alike draw from the same law, to the bit: that of the first of them."""
    B, K, L = uniforms_BKL.shape
    drafter, target, states, vocab = drafting.drafter, drafting.target, drafting.state_B1H, drafting.vocab
    kept_ids = vocab.kept_ids
    own = torch.eye(K, dtype=torch.bool, device=states.device).expand(B, K, K)
    alike, tokens = torch.ones_like(own), torch.zeros_like(uniforms_BKL, dtype=torch.int64)
    for d in range(L):
        if d:
            seen = own.repeat(1, 1, d)
            said = target.embed(tokens[..., d - 1])
            states = drafter.step(states.expand(B, K, -1), said, drafting.cache, d - 1, seen)
        fused = states.is_cuda and drafting.kernels and drafting.cache.bucket
        now = law(drafter.fused_logits(states) if fused else drafter.logits(states), temperature, top_p=top_p)
        if laws_BMV.shape[1]:
            place = slice(1 + (d - 1) * K, 1 + d * K) if d else slice(1)
            laws_BMV[:, place].index_copy_(2, kept_ids, now.to(laws_BMV.dtype))
        first = alike.to(torch.uint8).argmax(2)
        tokens[..., d] = vocab.to_target(draw_rows(now, first, uniforms_BKL[..., d]))
        alike = alike & (tokens[..., d].unsqueeze(2) == tokens[..., d].unsqueeze(1))
    return tokens
