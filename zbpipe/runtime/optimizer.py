"""What an optimizer needs from all ranks at once."""

from __future__ import annotations

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
    """Clip by the norm over every rank's gradients; returns that norm (0-d, the same everywhere).

    It is fp64 if any rank has such gradients, else fp32. `counted`: those of `parameters` that no
    other rank counts.
    """
    grads = [p.grad for p in counted if p.grad is not None]
    wide = any(grad.dtype == torch.float64 for grad in grads)
    norms = [
        torch.linalg.vector_norm(g, norm_type, dtype=torch.promote_types(g.dtype, torch.float32))
        for g in grads
    ]
    own = torch.tensor([float(norm) for norm in norms] or [0.0], dtype=torch.float64)
    parts = world.gather((float(torch.linalg.vector_norm(own, norm_type)), wide))
    total = torch.linalg.vector_norm(
        torch.tensor([part for part, _ in parts], dtype=torch.float64), norm_type
    )
    result: torch.Tensor = total.to(
        torch.float64 if any(wide for _, wide in parts) else torch.float32
    )
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, result)
    return result
