"""dX = dY W: the input gradient of a linear layer (its I)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tables
from .arguments import check_dgrad, check_matrix, check_same_dtype
from .target import architecture, can_use_descriptors, interpreting, upcasts
from .tiles import operand, tile_of


@triton.jit(do_not_specialize=["rows"])
def dgrad_kernel(
    dY, W, dX, rows, outs, ins, stride_y, stride_wo, stride_wi, stride_x,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTS: tl.constexpr, BLOCK_INS: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One (BLOCK_ROWS, BLOCK_INS) tile of dX; W may lie either way."""
    tile_r, tile_i = tile_of(
        tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS), tl.cdiv(ins, BLOCK_INS), GROUP
    )
    r = (tile_r * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    i = (tile_i * BLOCK_INS + tl.arange(0, BLOCK_INS)).to(tl.int64)
    o = tl.arange(0, BLOCK_OUTS)
    left = dY + r[:, None] * stride_y + o[None, :]
    right = W + o[:, None] * stride_wo + i[None, :] * stride_wi
    acc = tl.zeros((BLOCK_ROWS, BLOCK_INS), tl.float32)
    for at in range(0, outs, BLOCK_OUTS):
        y = tl.load(left, mask=(r[:, None] < rows) & (at + o[None, :] < outs), other=0.0)
        w = tl.load(right, mask=(at + o[:, None] < outs) & (i[None, :] < ins), other=0.0)
        acc = tl.dot(operand(y, UPCAST), operand(w, UPCAST), acc, input_precision=PRECISION)
        left += BLOCK_OUTS
        right += BLOCK_OUTS * stride_wo
    to = dX + r[:, None] * stride_x + i[None, :]
    tl.store(to, acc.to(dX.dtype.element_ty), mask=(r[:, None] < rows) & (i[None, :] < ins))


@triton.jit(do_not_specialize=["rows"])
def dgrad_tma_kernel(
    dY, W, dX, rows, outs, ins,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTS: tl.constexpr, BLOCK_INS: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The same through tensor descriptors made on the host; edges are the hardware's."""
    tile_r, tile_i = tile_of(
        tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS), tl.cdiv(ins, BLOCK_INS), GROUP
    )
    r, i = tile_r * BLOCK_ROWS, tile_i * BLOCK_INS
    acc = tl.zeros((BLOCK_ROWS, BLOCK_INS), tl.float32)
    for at in range(0, outs, BLOCK_OUTS):
        y = dY.load([r, at])
        w = W.load([at, i])
        acc = tl.dot(operand(y, UPCAST), operand(w, UPCAST), acc, input_precision=PRECISION)
    dX.store([r, i], acc.to(dX.dtype))


def dgrad(
    dY: Tensor,
    W: Tensor,
    out: Tensor | None = None,
    *,
    tf32: bool = False,
    config: tables.Config | None = None,
) -> Tensor:
    """dX (rows, ins) = dY (rows, outs) @ W (outs, ins), summed in fp32, in dY's dtype.

    dY's last dimension and one dimension of W are contiguous; `out` receives dX if given. fp32
    products are exact unless `tf32`. `config` replaces the table's choice.
    Raises ConfigError naming the argument that does not fit.
    """
    rows, outs, ins = check_dgrad(dY, W)
    dX = torch.empty(rows, ins, dtype=dY.dtype, device=dY.device) if out is None else out
    check_matrix("out", dX, (rows, ins))
    check_same_dtype("out", dX, "dY", dY)
    if dX.numel() == 0:
        return dX
    able = can_use_descriptors(dY, W, dX)
    if config is None:
        shape = (rows, outs, ins)
        arch = architecture(dY.device)
        config = tables.choose("dgrad", arch, dY.dtype, shape, able, need_tiles=True)
        config = tables.INTERPRETED if interpreting() else config
    grid = (triton.cdiv(rows, config.rows) * triton.cdiv(ins, config.ins),)
    meta = config.meta() | {"PRECISION": "tf32" if tf32 else "ieee", "UPCAST": upcasts(dY)}
    if config.tma and able:
        _launch_tma(grid, dY, W, dX, meta)
        return dX
    dgrad_kernel[grid](
        dY, W, dX, rows, outs, ins, dY.stride(0), W.stride(0), W.stride(1), dX.stride(0),
        **meta,
    )  # fmt: skip
    return dX


def _launch_tma(grid: tuple[int], dY: Tensor, W: Tensor, dX: Tensor, meta: dict[str, Any]) -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows, outs, ins = meta["BLOCK_ROWS"], meta["BLOCK_OUTS"], meta["BLOCK_INS"]
    dgrad_tma_kernel[grid](
        TensorDescriptor.from_tensor(dY, [rows, outs]),
        TensorDescriptor.from_tensor(W, [outs, ins]),
        TensorDescriptor.from_tensor(dX, [rows, ins]),
        *dY.shape, W.shape[1], **meta,
    )  # fmt: skip


def reference(dY: Tensor, W: Tensor) -> Tensor:
    """The same in fp64."""
    return dY.double() @ W.double()
