"""What the kernels' cases share: where they run, operands, how close a result must be.

Errors are relative to the largest value of the fp64 reference. Tolerances: fp32 sums of these sizes
were off by 3e-7 at most; a 16-bit result is rounded once, by 2⁻⁹ or 2⁻¹². Tensor cores truncate as
they add products of 16-bit operands: ten times as much is allowed there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zbpipe.kernels import tables, target

HERE = target.architecture(torch.device("cpu" if target.interpreting() else "cuda", 0))
DEVICE = "cpu" if target.interpreting() else "cuda"

# (dtype, atol, rtol) of a result in that dtype; sums into fp32 are held to SUM whatever they add.
TOLERANCES = [
    (torch.float32, 1e-6, 1e-6),
    (torch.float16, 1e-3, 1e-3),
    (torch.bfloat16, 1e-2, 1e-2),
]
DTYPES = [dtype for dtype, _, _ in TOLERANCES]
SUM = (1e-6, 1e-6)


def sum_of_products(dtype: torch.dtype) -> tuple[float, float]:
    """(atol, rtol) of a product's fp32 sum."""
    truncated = DEVICE == "cuda" and dtype != torch.float32
    return (1e-5, 1e-5) if truncated else SUM


TMA = tables.Config(16, 16, 32, 4, 2, "small, for the interpreter", tma=True, group=2)
POINTERS = tables.INTERPRETED


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def assert_close(got: Tensor, want: Tensor, atol: float, rtol: float) -> None:
    """Within atol of the reference's largest value plus rtol of each value; never NaN."""
    assert got.shape == want.shape
    if want.numel() == 0:
        return
    assert torch.isfinite(got).all()
    limit = atol * want.abs().max() + rtol * want.abs()
    error = (got.double() - want).abs()
    assert bool((error <= limit).all()), float((error - limit).max())
