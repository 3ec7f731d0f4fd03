"""The rules' kernels for a GPU (Triton): what is done to whole laws, in one pass over them.

R rows of laws, J sets of coefficients, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _mass_of_chunk(
    q, p, rows, coefficients, out, V, nodes_q, nodes_p, M, J, chunks, PICKED: tl.constexpr, BLOCK: tl.constexpr
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    node = row % M
    if PICKED:
        node = tl.load(rows + row)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = at < V
    b = (row // M).to(tl.int64)
    target = tl.load(q + (b * nodes_q + node) * V + at, mask=inside, other=0.0).to(tl.float64)
    draft = tl.load(p + (b * nodes_p + node) * V + at, mask=inside, other=0.0).to(tl.float64)
    for j in range(J):
        base = coefficients + (row * J + j) * 5
        weight, minus, up = tl.load(base), tl.load(base + 1), tl.load(base + 2)
        gain, cost = tl.load(base + 3), tl.load(base + 4)
        share = tl.minimum(tl.maximum(target * gain - draft * cost, 0.0), draft)
        left = tl.maximum(target * weight - draft * minus - share * up, 0.0)
        tl.store(out + (row * J + j) * chunks + chunk, tl.sum(left, 0))


def masses(q_BNV: Tensor, p_BMV: Tensor, rows_BR: Tensor | None, coefficients_BRJ5: Tensor) -> Tensor:
    """`eval.masses.masses` [B, R, J] float64."""
    B, R, J, _ = coefficients_BRJ5.shape
    V, chunks = q_BNV.shape[2], triton.cdiv(q_BNV.shape[2], BLOCK)
    out = torch.empty(B, R, J, chunks, dtype=torch.float64, device=q_BNV.device)
    picked = coefficients_BRJ5 if rows_BR is None else rows_BR.contiguous()
    _mass_of_chunk[(B * R, chunks)](
        q_BNV, p_BMV, picked, coefficients_BRJ5.contiguous(), out, V, q_BNV.shape[1], p_BMV.shape[1], R, J, chunks,
        rows_BR is not None, BLOCK, num_warps=8,
    )  # fmt: skip
    return out.sum(3)
