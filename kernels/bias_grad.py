"""db += the column sums of dY: a kernel of its own, since inside wgrad it slows the main loop.

In two passes without atomics: the sums of `parts_of(rows)` parts of each microbatch, many programs
at once; then those sums in order, from db on. Parts never span two microbatches, so one launch for
several gives the bits of a launch each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import as_ring, check_gradient, check_matrix, check_ring

COLUMNS = 64  # a program: 128 bytes of a bf16 row, one line of L2
ROWS = 64  # a block of them: 16 KB of fp32 in flight a stage; not yet run
MOST_PARTS = 16  # with 4096 features 1024 programs, 8 an SM of H100 (bench/roofline.py)


@triton.jit(do_not_specialize=["rows", "first", "slots", "chunk", "count_parts"])
def bias_grad_kernel(
    dY, parts, rows, outs, first, slots, stride_ys, stride_y, chunk, count_parts,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTS: tl.constexpr,
):  # fmt: skip
    """parts[step, part] = the sum of `chunk` rows of slot first + step: BLOCK_OUTS columns."""
    o = tl.program_id(0) * BLOCK_OUTS + tl.arange(0, BLOCK_OUTS)
    part, step = tl.program_id(1), tl.program_id(2)
    slot = ((first + step) % slots).to(tl.int64)
    acc = tl.zeros((BLOCK_OUTS,), tl.float32)
    last = min(rows, (part + 1) * chunk)
    for at in range(part * chunk, last, BLOCK_ROWS):
        r = at + tl.arange(0, BLOCK_ROWS)
        y = tl.load(
            dY + slot * stride_ys + r[:, None].to(tl.int64) * stride_y + o[None, :],
            mask=(r[:, None] < last) & (o[None, :] < outs), other=0.0,
        )  # fmt: skip
        acc += tl.sum(y.to(tl.float32), 0)
    tl.store(parts + (step * count_parts + part) * outs + o, acc, mask=o < outs)


@triton.jit(do_not_specialize=["count", "count_parts"])
def parts_sum_kernel(
    parts, total, outs, count, count_parts, BLOCK_PARTS: tl.constexpr, BLOCK_OUTS: tl.constexpr
):
    """total += parts, (count, count_parts, outs), one microbatch after the other."""
    o = tl.program_id(0) * BLOCK_OUTS + tl.arange(0, BLOCK_OUTS)
    acc = tl.load(total + o, mask=o < outs, other=0.0)
    p = tl.arange(0, BLOCK_PARTS)
    for step in range(count):
        at = parts + (step * count_parts + p[:, None]) * outs + o[None, :]
        inside = (p[:, None] < count_parts) & (o[None, :] < outs)
        acc += tl.sum(tl.load(at, mask=inside, other=0.0), 0)
    tl.store(total + o, acc, mask=o < outs)


def parts_of(rows: int) -> int:
    """How many parts the rows of a microbatch are summed in: at least 128 rows each."""
    return min(max(rows // 128, 1), MOST_PARTS)


def add_parts(total: Tensor, parts: Tensor) -> None:
    """total (n,) += parts (count, parts_of(rows), n), in order; all fp32."""
    count, count_parts, n = parts.shape
    parts_sum_kernel[(triton.cdiv(n, COLUMNS),)](
        parts, total, n, count, count_parts,
        BLOCK_PARTS=MOST_PARTS, BLOCK_OUTS=COLUMNS, num_warps=4, num_stages=2,
    )  # fmt: skip


def bias_grad(db: Tensor, dY: Tensor, first: int = 0, count: int | None = None) -> Tensor:
    """db (outs,) += Σ dY[s] over rows, and over `count` slots s from `first`, modulo their number.

    db is fp32 and contiguous, dY (slots, rows, outs) or (rows, outs) with a contiguous last
    dimension. Returns db. Raises ConfigError naming the argument that does not fit.
    """
    dY = as_ring("dY", dY)
    check_matrix("dY", dY, (None, None, None))
    slots, rows, outs = dY.shape
    check_gradient("db", db, (outs,))
    count = slots if count is None else count
    check_ring(first, count, slots)
    if count == 0 or outs == 0 or rows == 0:
        return db
    parts = torch.empty(count, parts_of(rows), outs, dtype=torch.float32, device=dY.device)
    bias_grad_kernel[(triton.cdiv(outs, COLUMNS), *reversed(parts.shape[:2]))](
        dY, parts, rows, outs, first, slots, dY.stride(0), dY.stride(1),
        triton.cdiv(rows, parts.shape[1]), parts.shape[1],
        BLOCK_ROWS=ROWS, BLOCK_OUTS=COLUMNS, num_warps=4, num_stages=3,
    )  # fmt: skip
    add_parts(db, parts)
    return db


def reference(db: Tensor, dY: Tensor, first: int = 0, count: int | None = None) -> Tensor:
    """What db becomes, in fp64; db itself is left alone."""
    dY = as_ring("dY", dY)
    count = len(dY) if count is None else count
    total = db.double()
    for step in range(count):
        total = total + dY[(first + step) % len(dY)].double().sum(0)
    return total
