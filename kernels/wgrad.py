"""dW += dYᵀ X: the weight gradient of a linear layer (its W), of one microbatch or of several.

A grouped W takes the microbatches as they lie, each in a tensor of its own: the X of a layer is
what some layer before it made, and dY what autograd made, so to have them in one arena would cost a
copy of both. A launch takes a few pairs (`most`) as arguments (no table on the device, which would
have to be copied there first) and reads and writes dW once. The accumulator starts from dW itself:
so one launch for all gives the same bits as a launch each (adding a sum that started from zero
would not).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tables
from .arguments import LOW, check_wgrad
from .tables import MOST
from .target import architecture, can_use_descriptors, interpreting, upcasts
from .tiles import operand, tile_of


@triton.jit
def add_microbatch(
    acc, dY, X, rows, o, i, outs, ins, stride_y, stride_x,
    BLOCK_ROWS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """acc (o, i) + dYᵀ X of one microbatch: blocks of rows never span two."""
    for at in range(0, rows, BLOCK_ROWS):
        r = at + tl.arange(0, BLOCK_ROWS)
        y = tl.load(
            dY + r[:, None].to(tl.int64) * stride_y + o[None, :],
            mask=(r[:, None] < rows) & (o[None, :] < outs), other=0.0,
        )  # fmt: skip
        x = tl.load(
            X + r[:, None].to(tl.int64) * stride_x + i[None, :],
            mask=(r[:, None] < rows) & (i[None, :] < ins), other=0.0,
        )  # fmt: skip
        y, x = operand(y, UPCAST), operand(x, UPCAST)
        acc = tl.dot(tl.trans(y), x, acc, input_precision=PRECISION)
    return acc


@triton.jit
def add_microbatch_tma(
    acc, dY, X, rows, o, i,
    BLOCK_ROWS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The same through descriptors, from columns o and i on; rows past the last are zeros."""
    for at in range(0, rows, BLOCK_ROWS):
        y, x = operand(dY.load([at, o]), UPCAST), operand(X.load([at, i]), UPCAST)
        acc = tl.dot(tl.trans(y), x, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["rows0", "rows1", "rows2", "rows3"])
def wgrad_kernel(
    dY0, X0, rows0, dY1, X1, rows1, dY2, X2, rows2, dY3, X3, rows3,
    dW, outs, ins, stride_y, stride_x, stride_w, COUNT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTS: tl.constexpr, BLOCK_INS: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One (BLOCK_OUTS, BLOCK_INS) tile of dW, over the first COUNT of the microbatches."""
    tile_o, tile_i = tile_of(
        tl.program_id(0), tl.cdiv(outs, BLOCK_OUTS), tl.cdiv(ins, BLOCK_INS), GROUP
    )
    o = (tile_o * BLOCK_OUTS + tl.arange(0, BLOCK_OUTS)).to(tl.int64)
    i = (tile_i * BLOCK_INS + tl.arange(0, BLOCK_INS)).to(tl.int64)
    inside = (o[:, None] < outs) & (i[None, :] < ins)
    to = dW + o[:, None] * stride_w + i[None, :]
    acc = tl.load(to, mask=inside, other=0.0)
    acc = add_microbatch(
        acc, dY0, X0, rows0, o, i, outs, ins, stride_y, stride_x, BLOCK_ROWS, PRECISION, UPCAST
    )
    if COUNT > 1:
        acc = add_microbatch(
            acc, dY1, X1, rows1, o, i, outs, ins, stride_y, stride_x, BLOCK_ROWS, PRECISION, UPCAST
        )
    if COUNT > 2:
        acc = add_microbatch(
            acc, dY2, X2, rows2, o, i, outs, ins, stride_y, stride_x, BLOCK_ROWS, PRECISION, UPCAST
        )
    if COUNT > 3:
        acc = add_microbatch(
            acc, dY3, X3, rows3, o, i, outs, ins, stride_y, stride_x, BLOCK_ROWS, PRECISION, UPCAST
        )
    tl.store(to, acc, mask=inside)


@triton.jit(do_not_specialize=["rows0", "rows1", "rows2", "rows3"])
def wgrad_tma_kernel(
    dY0, X0, rows0, dY1, X1, rows1, dY2, X2, rows2, dY3, X3, rows3,
    dW, outs, ins, stride_w, COUNT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTS: tl.constexpr, BLOCK_INS: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The same with dY and X read through descriptors, made on the host.

    dW stays with plain pointers: an fp32 tile in shared memory beside four stages would be over the
    limit.
    """
    tile_o, tile_i = tile_of(
        tl.program_id(0), tl.cdiv(outs, BLOCK_OUTS), tl.cdiv(ins, BLOCK_INS), GROUP
    )
    from_o, from_i = tile_o * BLOCK_OUTS, tile_i * BLOCK_INS
    o = (from_o + tl.arange(0, BLOCK_OUTS)).to(tl.int64)
    i = (from_i + tl.arange(0, BLOCK_INS)).to(tl.int64)
    inside = (o[:, None] < outs) & (i[None, :] < ins)
    to = dW + o[:, None] * stride_w + i[None, :]
    acc = tl.load(to, mask=inside, other=0.0)
    acc = add_microbatch_tma(acc, dY0, X0, rows0, from_o, from_i, BLOCK_ROWS, PRECISION, UPCAST)
    if COUNT > 1:
        acc = add_microbatch_tma(acc, dY1, X1, rows1, from_o, from_i, BLOCK_ROWS, PRECISION, UPCAST)
    if COUNT > 2:
        acc = add_microbatch_tma(acc, dY2, X2, rows2, from_o, from_i, BLOCK_ROWS, PRECISION, UPCAST)
    if COUNT > 3:
        acc = add_microbatch_tma(acc, dY3, X3, rows3, from_o, from_i, BLOCK_ROWS, PRECISION, UPCAST)
    tl.store(to, acc, mask=inside)


Pair = tuple[Tensor, Tensor]
# What microbatches of one launch have in common: tiles, through descriptors, strides of dY and X.
Way = tuple[tables.Config, bool, int, int]


def wgrad(
    dW: Tensor,
    dY: Tensor | Sequence[Tensor],
    X: Tensor | Sequence[Tensor],
    *,
    tf32: bool = False,
    config: tables.Config | None = None,
) -> Tensor:
    """dW (outs, ins) += Σ dY[m]ᵀ X[m] over the microbatches m, in order; one, or a sequence each.

    dW is fp32. dY[m] (rows, outs) and X[m] (rows, ins) have one dtype and a contiguous last
    dimension; rows may differ between microbatches. Those that follow one another with one choice
    of tiles and the same strides are one launch, up to `most(dtype)` of them. fp32 products are
    exact unless `tf32`. `config` replaces the table's choice. Returns dW.
    Raises ConfigError naming the argument that does not fit.
    """
    dY, X = ([t] if isinstance(t, Tensor) else t for t in (dY, X))
    check_wgrad(dW, dY, X)
    if dW.numel() == 0:
        return dW
    pairs = [(y, x) for y, x in zip(dY, X, strict=True) if len(y) > 0]
    for way, alike in groupby(pairs, lambda pair: _way(*pair, config)):
        run, count = list(alike), most(pairs[0][0].dtype)
        for start in range(0, len(run), count):
            _launch(dW, run[start : start + count], way, tf32)
    return dW


def most(dtype: torch.dtype) -> int:
    """Microbatches in one launch, of operands of `dtype`.

    One of fp32: its exact products take so long that dW's traffic is 4 % of them (2048 rows of
    4096 × 4096 on H100, bench/roofline.py), and four in a kernel spill registers on some targets.
    """
    return MOST if dtype in LOW else 1


def _way(dY: Tensor, X: Tensor, config: tables.Config | None) -> Way:
    able = can_use_descriptors(dY, X)
    if config is None:
        shape = (len(dY), dY.shape[1], X.shape[1])
        arch = architecture(dY.device)
        config = tables.choose("wgrad", arch, dY.dtype, shape, able, need_tiles=True)
        config = tables.INTERPRETED if interpreting() else config
    return config, config.tma and able, dY.stride(0), X.stride(0)


def _launch(dW: Tensor, pairs: Sequence[Pair], way: Way, tf32: bool) -> None:
    config, by_tma, *strides = way
    outs, ins = dW.shape
    grid = (triton.cdiv(outs, config.outs) * triton.cdiv(ins, config.ins),)
    meta = config.meta() | {"PRECISION": "tf32" if tf32 else "ieee", "UPCAST": upcasts(pairs[0][0])}
    kernel = wgrad_tma_kernel if by_tma else wgrad_kernel
    kernel[grid](
        *_arguments(pairs, config if by_tma else None),
        dW, outs, ins, *(() if by_tma else strides), dW.stride(0), COUNT=len(pairs), **meta,
    )  # fmt: skip


def _arguments(pairs: Sequence[Pair], tiles: tables.Config | None) -> Iterator[object]:
    """dY, X and rows of `MOST` microbatches, None past the last; descriptors of these tiles."""
    for dY, X in pairs:
        if tiles is None:
            yield from (dY, X, len(dY))
            continue
        from triton.tools.tensor_descriptor import TensorDescriptor

        yield TensorDescriptor.from_tensor(dY, [tiles.rows, tiles.outs])
        yield TensorDescriptor.from_tensor(X, [tiles.rows, tiles.ins])
        yield len(dY)
    yield from [None] * (3 * (MOST - len(pairs)))


def reference(dW: Tensor, dY: Tensor | Sequence[Tensor], X: Tensor | Sequence[Tensor]) -> Tensor:
    """What dW becomes, in fp64; dW itself is left alone."""
    dY, X = ([t] if isinstance(t, Tensor) else t for t in (dY, X))
    total = dW.double()
    for y, x in zip(dY, X, strict=True):
        total = total + y.double().t() @ x.double()
    return total
