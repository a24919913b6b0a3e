"""The input gradient of layer norm and RMS norm (their I), from what F kept: x, mean and rstd.

y = x̂ (offset + weight) + bias with x̂ = (x − mean) rstd; RMS norm has no mean and no bias, Gemma's
has offset 1. dX = rstd (g − mean(g x̂) x̂ − mean(g)), g = dY (offset + weight), the last term with a
mean only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zbpipe.errors import ConfigError

from .arguments import check_matrix, check_norm, check_same_dtype

LONGEST = 16384  # features: a row is one block; twice as many spill (COMPILED.md)


@triton.jit
def norm_dgrad_kernel(
    dY, X, weight, mean, rstd, dX, n, offset, stride_y, stride_x, stride_d,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < n
    x = tl.load(X + row * stride_x + i, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(dY + row * stride_y + i, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32) + offset
    scale = tl.load(rstd + row)
    if CENTRED:
        x -= tl.load(mean + row)
    x_hat = tl.where(inside, x * scale, 0.0)
    g = tl.where(inside, y * w, 0.0)
    d = g - x_hat * (tl.sum(g * x_hat, 0) / n)
    if CENTRED:
        d -= tl.sum(g, 0) / n
    tl.store(dX + row * stride_d + i, (d * scale).to(dX.dtype.element_ty), mask=inside)


def norm_dgrad(
    dY: Tensor,
    X: Tensor,
    weight: Tensor,
    rstd: Tensor,
    mean: Tensor | None = None,
    offset: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """dX (rows, n) in X's dtype, computed in fp32.

    dY and X (rows, n) have one dtype and a contiguous last dimension, weight is (n,); rstd and mean
    (rows,) are fp32. With `mean` it is layer norm, without RMS norm. n is at most 16384.
    Raises ConfigError naming the argument that does not fit.
    """
    rows, n = check_norm(dY, X, rstd, mean)
    check_matrix("weight", weight, (n,))
    if n > LONGEST:
        raise ConfigError(f"X has {n} features: at most {LONGEST} fit into one block")
    dX = torch.empty(rows, n, dtype=X.dtype, device=X.device) if out is None else out
    check_matrix("out", dX, (rows, n))
    check_same_dtype("out", dX, "X", X)
    if dX.numel() == 0:
        return dX
    block = triton.next_power_of_2(n)
    norm_dgrad_kernel[(rows,)](
        dY, X, weight, rstd if mean is None else mean, rstd, dX, n, offset,
        dY.stride(0), X.stride(0), dX.stride(0), CENTRED=mean is not None, BLOCK=block,
        num_warps=warps(block), num_stages=1,
    )  # fmt: skip
    return dX


def warps(block: int) -> int:
    """16 elements a thread and more warps for longer rows, 1 to 16; not yet run."""
    return min(max(block // 512, 1), 16)


def reference(
    dY: Tensor,
    X: Tensor,
    weight: Tensor,
    rstd: Tensor,
    mean: Tensor | None = None,
    offset: float = 0.0,
) -> Tensor:
    """The same in fp64."""
    x = X.double() if mean is None else X.double() - mean.double()[:, None]
    x_hat = x * rstd.double()[:, None]
    g = dY.double() * (weight.double() + offset)
    d = g - x_hat * (g * x_hat).mean(1, keepdim=True)
    if mean is not None:
        d = d - g.mean(1, keepdim=True)
    return d * rstd.double()[:, None]
