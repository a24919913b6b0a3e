"""db += the column sums of dY: a kernel of its own, since inside wgrad it slows the main loop."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .arguments import as_ring, check_gradient, check_matrix, check_ring

# Columns a program: 128 programs for 4096 features, about one an SM; not yet run.
COLUMNS = 32
ROWS = 128


@triton.jit
def bias_grad_kernel(
    dY, db, rows, outs, first, count, slots, stride_ys, stride_y,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTS: tl.constexpr,
):  # fmt: skip
    """BLOCK_OUTS columns, all rows in order: no atomics, so the bits are always the same."""
    o = tl.program_id(0) * BLOCK_OUTS + tl.arange(0, BLOCK_OUTS)
    acc = tl.load(db + o, mask=o < outs, other=0.0)
    blocks = tl.cdiv(rows, BLOCK_ROWS)
    for step in range(count * blocks):
        slot = ((first + step // blocks) % slots).to(tl.int64)
        r = (step % blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        y = tl.load(
            dY + slot * stride_ys + r[:, None].to(tl.int64) * stride_y + o[None, :],
            mask=(r[:, None] < rows) & (o[None, :] < outs), other=0.0,
        )  # fmt: skip
        acc += tl.sum(y.to(tl.float32), 0)
    tl.store(db + o, acc, mask=o < outs)


def bias_grad(db: Tensor, dY: Tensor, first: int = 0, count: int | None = None) -> Tensor:
    """db (outs,) += Σ dY[s] over rows, and over `count` slots s from `first`, modulo their number.

    db is fp32 and contiguous, dY (slots, rows, outs) or (rows, outs) with a contiguous last
    dimension. One launch for several slots gives the bits of a launch each. Returns db.
    Raises ConfigError naming the argument that does not fit.
    """
    dY = as_ring("dY", dY)
    check_matrix("dY", dY, (None, None, None))
    slots, rows, outs = dY.shape
    check_gradient("db", db, (outs,))
    count = slots if count is None else count
    check_ring(first, count, slots)
    if count == 0 or outs == 0 or rows == 0:
        return db
    bias_grad_kernel[(triton.cdiv(outs, COLUMNS),)](
        dY, db, rows, outs, first, count, slots, dY.stride(0), dY.stride(1),
        BLOCK_ROWS=ROWS, BLOCK_OUTS=COLUMNS, num_warps=4, num_stages=3,
    )  # fmt: skip
    return db


def reference(db: Tensor, dY: Tensor, first: int = 0, count: int | None = None) -> Tensor:
    """What db becomes, in fp64; db itself is left alone."""
    dY = as_ring("dY", dY)
    count = len(dY) if count is None else count
    total = db.double()
    for step in range(count):
        total = total + dY[(first + step) % len(dY)].double().sum(0)
    return total
