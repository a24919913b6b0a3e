"""The weight and bias gradients of layer norm and RMS norm (their W): Σ dY x̂ and Σ dY over rows.

In the two passes of bias_grad.py: sums of parts of the rows, then those in order. No atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import check_gradient, check_norm
from .bias_grad import COLUMNS, add_parts, parts_of

ROWS = 32  # a block: two operands and two sums are in registers; not yet run


@triton.jit(do_not_specialize=["rows", "chunk"])
def norm_wgrad_kernel(
    dY, X, mean, rstd, parts_w, parts_b, rows, n, stride_y, stride_x, chunk,
    CENTRED: tl.constexpr, BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """parts[part] = the sums of `chunk` rows: BLOCK columns."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1)
    acc_w = tl.zeros((BLOCK,), tl.float32)
    acc_b = tl.zeros((BLOCK,), tl.float32)
    last = min(rows, (part + 1) * chunk)
    for at in range(part * chunk, last, BLOCK_ROWS):
        r = at + tl.arange(0, BLOCK_ROWS)
        inside = (r[:, None] < last) & (i[None, :] < n)
        r64 = r[:, None].to(tl.int64)
        y = tl.load(dY + r64 * stride_y + i[None, :], mask=inside, other=0.0).to(tl.float32)
        x = tl.load(X + r64 * stride_x + i[None, :], mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            x -= tl.load(mean + r, mask=r < last, other=0.0)[:, None]
        x *= tl.load(rstd + r, mask=r < last, other=0.0)[:, None]
        acc_w += tl.sum(y * x, 0)
        if BIAS:
            acc_b += tl.sum(y, 0)
    tl.store(parts_w + part * n + i, acc_w, mask=i < n)
    if BIAS:
        tl.store(parts_b + part * n + i, acc_b, mask=i < n)


def norm_wgrad(
    dW: Tensor,
    db: Tensor | None,
    dY: Tensor,
    X: Tensor,
    rstd: Tensor,
    mean: Tensor | None = None,
) -> None:
    """dW (n,) += Σ dY x̂ and, if there is one, db (n,) += Σ dY, over the rows in order.

    dW and db are fp32; dY and X (rows, n) have one dtype and a contiguous last dimension; rstd and
    mean (rows,) are fp32. With `mean` it is layer norm, without RMS norm; the weight's offset plays
    no part. Raises ConfigError naming the argument that does not fit.
    """
    rows, n = check_norm(dY, X, rstd, mean)
    check_gradient("dW", dW, (n,))
    if db is not None:
        check_gradient("db", db, (n,))
    if X.numel() == 0:
        return
    count = parts_of(rows)
    parts = torch.empty(2, count, n, dtype=torch.float32, device=X.device)
    norm_wgrad_kernel[(triton.cdiv(n, COLUMNS), count)](
        dY, X, rstd if mean is None else mean, rstd, parts[0], parts[1], rows, n,
        dY.stride(0), X.stride(0), triton.cdiv(rows, count),
        CENTRED=mean is not None, BIAS=db is not None,
        BLOCK_ROWS=ROWS, BLOCK=COLUMNS, num_warps=4, num_stages=3,
    )  # fmt: skip
    add_parts(dW, parts[0])
    if db is not None:
        add_parts(db, parts[1])


def reference(
    dW: Tensor,
    db: Tensor | None,
    dY: Tensor,
    X: Tensor,
    rstd: Tensor,
    mean: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """What dW and db become, in fp64; they themselves are left alone."""
    x = X.double() if mean is None else X.double() - mean.double()[:, None]
    total = dW.double() + (dY.double() * x * rstd.double()[:, None]).sum(0)
    return total, None if db is None else db.double() + dY.double().sum(0)
