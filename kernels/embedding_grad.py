"""dW[token] += the rows of dY of that token: the weight gradient of an embedding, without atomics.

The tokens are sorted (stably, so equal ones keep their order); the program at the first of a run of
equal tokens adds the whole run, row by row. The additions of a token always come in one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import check_embedding

COLUMNS = 512  # features a program: 4 warps read 4 values a thread; not yet run


@triton.jit(do_not_specialize=["count", "padding"])
def embedding_grad_kernel(
    tokens, order, dY, dW, count, width, padding, stride_y, stride_w, BLOCK: tl.constexpr
):
    """At the first of a run of equal tokens: BLOCK columns of the run; elsewhere nothing."""
    at = tl.program_id(0)
    token = tl.load(tokens + at)
    before = tl.load(tokens + at - 1, mask=at > 0, other=-1)
    if (token != before) & (token != padding):
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        to = dW + token.to(tl.int64) * stride_w + i
        acc = tl.load(to, mask=i < width, other=0.0)
        following = token
        while following == token:
            row = tl.load(order + at).to(tl.int64)
            acc += tl.load(dY + row * stride_y + i, mask=i < width, other=0.0).to(tl.float32)
            at += 1
            following = tl.load(tokens + at, mask=at < count, other=-1)
        tl.store(to, acc, mask=i < width)


def embedding_grad(dW: Tensor, dY: Tensor, indices: Tensor, padding_idx: int = -1) -> Tensor:
    """dW (vocabulary, width) += rows of dY (tokens, width) at `indices` (tokens,) of int64.

    dW is fp32; indices are not checked against the vocabulary, as that would wait for the device;
    those equal to `padding_idx` add nothing (-1: there is none). Returns dW.
    Raises ConfigError naming the argument that does not fit.
    """
    check_embedding(dW, dY, indices)
    width = dY.shape[1]
    if dY.numel() == 0:
        return dW
    tokens, order = torch.sort(indices, stable=True)
    grid = (len(indices), triton.cdiv(width, COLUMNS))
    embedding_grad_kernel[grid](
        tokens, order, dY, dW, len(indices), width, padding_idx, dY.stride(0), dW.stride(0),
        BLOCK=COLUMNS, num_warps=4, num_stages=1,
    )  # fmt: skip
    return dW


def reference(dW: Tensor, dY: Tensor, indices: Tensor, padding_idx: int = -1) -> Tensor:
    """What dW becomes, in fp64; dW itself is left alone."""
    kept = indices != padding_idx
    return dW.double().index_add(0, indices[kept], dY.double()[kept])
