"""The weight and bias gradients of layer norm and RMS norm (their W): Σ dY x̂ and Σ dY over rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .arguments import check_gradient, check_norm

# Columns a program: 128 programs for 4096 features, about one an SM; not yet run.
COLUMNS = 32
ROWS = 64


@triton.jit
def norm_wgrad_kernel(
    dY, X, mean, rstd, dW, db, rows, n, stride_y, stride_x,
    CENTRED: tl.constexpr, BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns, all rows in order: no atomics, so the bits are always the same."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.load(dW + i, mask=i < n, other=0.0)
    if BIAS:
        acc_b = tl.load(db + i, mask=i < n, other=0.0)
    for at in range(0, rows, BLOCK_ROWS):
        r = at + tl.arange(0, BLOCK_ROWS)
        inside = (r[:, None] < rows) & (i[None, :] < n)
        r64 = r[:, None].to(tl.int64)
        y = tl.load(dY + r64 * stride_y + i[None, :], mask=inside, other=0.0).to(tl.float32)
        x = tl.load(X + r64 * stride_x + i[None, :], mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            x -= tl.load(mean + r, mask=r < rows, other=0.0)[:, None]
        x *= tl.load(rstd + r, mask=r < rows, other=0.0)[:, None]
        acc += tl.sum(y * x, 0)
        if BIAS:
            acc_b += tl.sum(y, 0)
    tl.store(dW + i, acc, mask=i < n)
    if BIAS:
        tl.store(db + i, acc_b, mask=i < n)


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
    norm_wgrad_kernel[(triton.cdiv(n, COLUMNS),)](
        dY, X, rstd if mean is None else mean, rstd, dW, dW if db is None else db, rows, n,
        dY.stride(0), X.stride(0), CENTRED=mean is not None, BIAS=db is not None,
        BLOCK_ROWS=ROWS, BLOCK=COLUMNS, num_warps=4, num_stages=3,
    )  # fmt: skip


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
