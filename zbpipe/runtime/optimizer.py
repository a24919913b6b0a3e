"""What an optimizer needs from all ranks at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .world import World


def clip_grad_norm(
    world: World,
    parameters: Sequence[torch.nn.Parameter],
    counted: Sequence[torch.nn.Parameter],
    max_norm: float,
    norm_type: float,
) -> torch.Tensor:
    """Clip by the norm over every rank's gradients; returns that norm (0-d, fp32 or fp64).

    `counted`: those of `parameters` that no other rank counts.
    """
    grads = [p.grad for p in counted if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads, norm_type)
    parts = [float(part) for part in world.gather(float(norm))]
    if math.isinf(norm_type):
        total = max(parts)
    else:
        total = sum(part**norm_type for part in parts) ** (1.0 / norm_type)
    result = torch.tensor(total, dtype=norm.dtype if norm.is_floating_point() else None)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, result)
    return result
