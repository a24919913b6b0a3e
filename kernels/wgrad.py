"""dW += dYᵀ X: the weight gradient of a linear layer (its W), of one microbatch or of several.

The stash is a ring of slots, a microbatch each; a grouped W takes `count` of them in order from
`first`, and reads and writes dW once. The accumulator starts from dW itself: so one launch for all
gives the same bits as a launch each (adding a sum that started from zero would not).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import tables
from .arguments import as_ring, check_wgrad
from .target import architecture, can_use_descriptors, interpreting, upcasts
from .tiles import operand, tile_of


@triton.jit(do_not_specialize=["rows", "first", "count", "slots"])
def wgrad_kernel(
    dY, X, dW, rows, outs, ins, first, count, slots,
    stride_ys, stride_y, stride_xs, stride_x, stride_w,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTS: tl.constexpr, BLOCK_INS: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One (BLOCK_OUTS, BLOCK_INS) tile of dW; blocks of rows never span two microbatches."""
    tile_o, tile_i = tile_of(
        tl.program_id(0), tl.cdiv(outs, BLOCK_OUTS), tl.cdiv(ins, BLOCK_INS), GROUP
    )
    o = (tile_o * BLOCK_OUTS + tl.arange(0, BLOCK_OUTS)).to(tl.int64)
    i = (tile_i * BLOCK_INS + tl.arange(0, BLOCK_INS)).to(tl.int64)
    inside = (o[:, None] < outs) & (i[None, :] < ins)
    to = dW + o[:, None] * stride_w + i[None, :]
    acc = tl.load(to, mask=inside, other=0.0)
    blocks = tl.cdiv(rows, BLOCK_ROWS)
    for step in range(count * blocks):
        slot = ((first + step // blocks) % slots).to(tl.int64)
        r = (step % blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        y = tl.load(
            dY + slot * stride_ys + r[:, None].to(tl.int64) * stride_y + o[None, :],
            mask=(r[:, None] < rows) & (o[None, :] < outs), other=0.0,
        )  # fmt: skip
        x = tl.load(
            X + slot * stride_xs + r[:, None].to(tl.int64) * stride_x + i[None, :],
            mask=(r[:, None] < rows) & (i[None, :] < ins), other=0.0,
        )  # fmt: skip
        y, x = operand(y, UPCAST), operand(x, UPCAST)
        acc = tl.dot(tl.trans(y), x, acc, input_precision=PRECISION)
    tl.store(to, acc, mask=inside)


@triton.jit(do_not_specialize=["rows", "first", "count", "slots"])
def wgrad_tma_kernel(
    dY, X, dW, rows, outs, ins, first, count, slots, stride_w,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTS: tl.constexpr, BLOCK_INS: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The same with the stash read through (slots, rows, n) descriptors, made on the host.

    Rows past a microbatch's last are outside the descriptor and read as zeros. dW stays with plain
    pointers: an fp32 tile in shared memory beside four stages would be over the limit.
    """
    tile_o, tile_i = tile_of(
        tl.program_id(0), tl.cdiv(outs, BLOCK_OUTS), tl.cdiv(ins, BLOCK_INS), GROUP
    )
    o = (tile_o * BLOCK_OUTS + tl.arange(0, BLOCK_OUTS)).to(tl.int64)
    i = (tile_i * BLOCK_INS + tl.arange(0, BLOCK_INS)).to(tl.int64)
    inside = (o[:, None] < outs) & (i[None, :] < ins)
    to = dW + o[:, None] * stride_w + i[None, :]
    acc = tl.load(to, mask=inside, other=0.0)
    blocks = tl.cdiv(rows, BLOCK_ROWS)
    for step in range(count * blocks):
        slot = (first + step // blocks) % slots
        r = (step % blocks) * BLOCK_ROWS
        y = dY.load([slot, r, tile_o * BLOCK_OUTS]).reshape(BLOCK_ROWS, BLOCK_OUTS)
        x = X.load([slot, r, tile_i * BLOCK_INS]).reshape(BLOCK_ROWS, BLOCK_INS)
        y, x = operand(y, UPCAST), operand(x, UPCAST)
        acc = tl.dot(tl.trans(y), x, acc, input_precision=PRECISION)
    tl.store(to, acc, mask=inside)


def wgrad(
    dW: Tensor,
    dY: Tensor,
    X: Tensor,
    first: int = 0,
    count: int | None = None,
    *,
    tf32: bool = False,
    config: tables.Config | None = None,
) -> Tensor:
    """dW (outs, ins) += Σ dY[s]ᵀ X[s] over `count` slots s from `first`, modulo their number.

    dW is fp32. dY (slots, rows, outs) and X (slots, rows, ins) have one dtype and a contiguous last
    dimension; without the first dimension they are one slot. `count` None means all slots. fp32
    products are exact unless `tf32`. `config` replaces the table's choice. Returns dW.
    Raises ConfigError naming the argument that does not fit.
    """
    dY, X = as_ring("dY", dY), as_ring("X", X)
    slots = len(dY)
    count = slots if count is None else count
    rows, outs, ins = check_wgrad(dW, dY, X, first, count)
    if count == 0 or dW.numel() == 0 or rows == 0:
        return dW
    able = can_use_descriptors(dY, X)
    if config is None:
        shape = (rows, outs, ins)
        arch = architecture(dY.device)
        config = tables.choose("wgrad", arch, dY.dtype, shape, able, need_tiles=True)
        config = tables.INTERPRETED if interpreting() else config
    grid = (triton.cdiv(outs, config.outs) * triton.cdiv(ins, config.ins),)
    ring = (rows, outs, ins, first, count, slots)
    meta = config.meta() | {"PRECISION": "tf32" if tf32 else "ieee", "UPCAST": upcasts(dY)}
    if config.tma and able:
        from triton.tools.tensor_descriptor import TensorDescriptor

        wgrad_tma_kernel[grid](
            TensorDescriptor.from_tensor(dY, [1, config.rows, config.outs]),
            TensorDescriptor.from_tensor(X, [1, config.rows, config.ins]),
            dW, *ring, dW.stride(0), **meta,
        )  # fmt: skip
        return dW
    wgrad_kernel[grid](
        dY, X, dW, *ring, dY.stride(0), dY.stride(1), X.stride(0), X.stride(1), dW.stride(0),
        **meta,
    )  # fmt: skip
    return dW


def reference(
    dW: Tensor, dY: Tensor, X: Tensor, first: int = 0, count: int | None = None
) -> Tensor:
    """What dW becomes, in fp64; dW itself is left alone."""
    dY, X = as_ring("dY", dY), as_ring("X", X)
    total = dW.double()
    for step in range(len(dY) if count is None else count):
        slot = (first + step) % len(dY)
        total = total + dY[slot].double().t() @ X[slot].double()
    return total
