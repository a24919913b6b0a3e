"""db += the column sums of dY: a kernel of its own, since inside wgrad it slows the main loop.

In two passes without atomics: the sums of `parts_of(rows)` parts, many programs at once; then those
sums in order, from db on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import check_gradient, check_matrix

COLUMNS = 64  # a program: 128 bytes of a bf16 row, one line of L2
ROWS = 64  # a block of them: 16 KB of fp32 in flight a stage; not yet run
MOST_PARTS = 16  # with 4096 features 1024 programs, 8 an SM of H100 (bench/roofline.py)


@triton.jit(do_not_specialize=["rows", "chunk"])
def bias_grad_kernel(
    dY, parts, rows, outs, stride_y, chunk, BLOCK_ROWS: tl.constexpr, BLOCK_OUTS: tl.constexpr
):
    """parts[part] = the sum of `chunk` rows: BLOCK_OUTS columns."""
    o = tl.program_id(0) * BLOCK_OUTS + tl.arange(0, BLOCK_OUTS)
    part = tl.program_id(1)
    acc = tl.zeros((BLOCK_OUTS,), tl.float32)
    last = min(rows, (part + 1) * chunk)
    for at in range(part * chunk, last, BLOCK_ROWS):
        r = at + tl.arange(0, BLOCK_ROWS)
        y = tl.load(
            dY + r[:, None].to(tl.int64) * stride_y + o[None, :],
            mask=(r[:, None] < last) & (o[None, :] < outs), other=0.0,
        )  # fmt: skip
        acc += tl.sum(y.to(tl.float32), 0)
    tl.store(parts + part * outs + o, acc, mask=o < outs)


@triton.jit(do_not_specialize=["count_parts"])
def parts_sum_kernel(
    parts, total, outs, count_parts, BLOCK_PARTS: tl.constexpr, BLOCK_OUTS: tl.constexpr
):
    """total += the sum of parts, (count_parts, outs)."""
    o = tl.program_id(0) * BLOCK_OUTS + tl.arange(0, BLOCK_OUTS)
    acc = tl.load(total + o, mask=o < outs, other=0.0)
    p = tl.arange(0, BLOCK_PARTS)
    inside = (p[:, None] < count_parts) & (o[None, :] < outs)
    acc += tl.sum(tl.load(parts + p[:, None] * outs + o[None, :], mask=inside, other=0.0), 0)
    tl.store(total + o, acc, mask=o < outs)


def parts_of(rows: int) -> int:
    """How many parts the rows are summed in: at least 128 rows each."""
    return min(max(rows // 128, 1), MOST_PARTS)


def add_parts(total: Tensor, parts: Tensor) -> None:
    """total (n,) += the sum of parts (parts_of(rows), n); both fp32."""
    count_parts, n = parts.shape
    parts_sum_kernel[(triton.cdiv(n, COLUMNS),)](
        parts, total, n, count_parts,
        BLOCK_PARTS=MOST_PARTS, BLOCK_OUTS=COLUMNS, num_warps=4, num_stages=2,
    )  # fmt: skip


def bias_grad(db: Tensor, dY: Tensor) -> Tensor:
    """db (outs,) += the column sums of dY (rows, outs).

    db is fp32 and contiguous, dY has a contiguous last dimension. Returns db. Raises ConfigError
    naming the argument that does not fit.
    """
    check_matrix("dY", dY, (None, None))
    rows, outs = dY.shape
    check_gradient("db", db, (outs,))
    if dY.numel() == 0:
        return db
    parts = torch.empty(parts_of(rows), outs, dtype=torch.float32, device=dY.device)
    bias_grad_kernel[(triton.cdiv(outs, COLUMNS), len(parts))](
        dY, parts, rows, outs, dY.stride(0), triton.cdiv(rows, len(parts)),
        BLOCK_ROWS=ROWS, BLOCK_OUTS=COLUMNS, num_warps=4, num_stages=3,
    )  # fmt: skip
    add_parts(db, parts)
    return db


def reference(db: Tensor, dY: Tensor) -> Tensor:
    """What db becomes, in fp64; db itself is left alone."""
    return db.double() + dY.double().sum(0)
