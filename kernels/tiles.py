"""What the kernels share: the order of tiles, and how an operand is read."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_of(program, tiles_a, tiles_b, GROUP: tl.constexpr):
    """(a, b) of this program's tile: GROUP tiles of a at a time, so that operands stay in L2."""
    width = GROUP * tiles_b
    group = program // width
    first = group * GROUP
    size = min(tiles_a - first, GROUP)
    a = first + (program % width) % size
    b = (program % width) // size
    return a, b


@triton.jit
def operand(tile, UPCAST: tl.constexpr):
    """A tile as `tl.dot` takes it; UPCAST when bf16 is interpreted (target.py)."""
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile
