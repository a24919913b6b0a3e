"""dW[e] += dY[rows of e]ᵀ X[rows of e]: the weight gradients of all experts in one launch.

The rows are sorted by expert, and where each expert's rows end is known on the device only: no
program waits for the host to read it. Each expert's tile starts from dW itself and adds its rows in
order, so it has the bits of a `wgrad` with the same tiles for that expert alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import tables
from .arguments import check_expert_wgrad
from .target import architecture, interpreting, upcasts
from .tiles import operand, tile_of


@triton.jit
def expert_wgrad_kernel(
    dY, X, dW, offsets, outs, ins, stride_y, stride_x, stride_we, stride_w,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTS: tl.constexpr, BLOCK_INS: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One (BLOCK_OUTS, BLOCK_INS) tile of one expert; nothing where the expert has no rows."""
    expert = tl.program_id(1)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    if start < end:
        tile_o, tile_i = tile_of(
            tl.program_id(0), tl.cdiv(outs, BLOCK_OUTS), tl.cdiv(ins, BLOCK_INS), GROUP
        )
        o = (tile_o * BLOCK_OUTS + tl.arange(0, BLOCK_OUTS)).to(tl.int64)
        i = (tile_i * BLOCK_INS + tl.arange(0, BLOCK_INS)).to(tl.int64)
        inside = (o[:, None] < outs) & (i[None, :] < ins)
        to = dW + expert.to(tl.int64) * stride_we + o[:, None] * stride_w + i[None, :]
        acc = tl.load(to, mask=inside, other=0.0)
        for at in range(start, end, BLOCK_ROWS):
            r = (at + tl.arange(0, BLOCK_ROWS))[:, None]
            y = tl.load(
                dY + r.to(tl.int64) * stride_y + o[None, :],
                mask=(r < end) & (o[None, :] < outs), other=0.0,
            )  # fmt: skip
            x = tl.load(
                X + r.to(tl.int64) * stride_x + i[None, :],
                mask=(r < end) & (i[None, :] < ins), other=0.0,
            )  # fmt: skip
            y, x = operand(y, UPCAST), operand(x, UPCAST)
            acc = tl.dot(tl.trans(y), x, acc, input_precision=PRECISION)
        tl.store(to, acc, mask=inside)


def expert_wgrad(
    dW: Tensor,
    dY: Tensor,
    X: Tensor,
    offsets: Tensor,
    *,
    tf32: bool = False,
    config: tables.Config | None = None,
) -> Tensor:
    """dW (experts, outs, ins) += for each expert e the rows offsets[e − 1] to offsets[e].

    dW is fp32; dY (rows, outs) and X (rows, ins) have one dtype and a contiguous last dimension,
    rows sorted by expert; offsets (experts,) int32 never fall and end at `rows` at most: rows after
    the last are no expert's and are not read. fp32 products are exact unless `tf32`. Returns dW.
    Raises ConfigError naming the argument that does not fit.
    """
    rows, outs, ins = check_expert_wgrad(dW, dY, X, offsets)
    if dW.numel() == 0 or rows == 0:
        return dW
    if config is None:
        shape = (rows // len(dW), outs, ins)
        arch = architecture(dY.device)
        config = tables.choose("wgrad", arch, dY.dtype, shape, False, need_tiles=True)
        config = tables.INTERPRETED if interpreting() else config
    grid = (triton.cdiv(outs, config.outs) * triton.cdiv(ins, config.ins), len(dW))
    expert_wgrad_kernel[grid](
        dY, X, dW, offsets, outs, ins, dY.stride(0), X.stride(0), dW.stride(0), dW.stride(1),
        PRECISION="tf32" if tf32 else "ieee", UPCAST=upcasts(dY), **config.meta(),
    )  # fmt: skip
    return dW


def reference(dW: Tensor, dY: Tensor, X: Tensor, offsets: Tensor) -> Tensor:
    """What dW becomes, in fp64; dW itself is left alone."""
    total, start = dW.double(), 0
    for expert, end in enumerate(offsets.tolist()):
        total[expert] += dY[start:end].double().t() @ X[start:end].double()
        start = end
    return total
