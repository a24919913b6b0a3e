"""What the rules' Functions ask of autograd and autocast: what is due, in which dtype."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def autocast_off(device: str) -> Any:
    """A context without autocast: I and W compute in F's dtypes, wherever they are called from."""
    if not autocasting() or autocast_dtype(device) is None:
        return _AS_IT_IS
    return torch.autocast(device, enabled=False)


_AS_IT_IS = nullcontext()


# Whether autocast is on for any device: one call, where each device type would be one.
autocasting = torch._C._is_any_autocast_enabled


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype that autocast casts to on this device type now, None if it is off."""
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """As autocast casts an operand of a matrix product: floating point, but never fp64."""
    if dtype is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def due(ctx: Any, first: int, last: int) -> list[bool] | None:
    """Which of the inputs first..last-1 this backward wants a `.grad` for.

    None: this is no accumulation (`autograd.grad`, or a backward with create_graph, as for a
    gradient penalty inside F), so the gradients go through autograd and nothing is recorded.
    """
    if torch.is_grad_enabled():
        return None
    nodes, needed = ctx.next_functions, ctx.needs_input_grad
    try:
        return [
            needed[i] and torch._C._will_engine_execute_node(nodes[i][0])
            for i in range(first, last)
        ]
    except RuntimeError:
        # The one thing the engine refuses here: a leaf's node under autograd.grad().
        return None


# Subclasses do with an operation what they want.
PLAIN = (Tensor, Parameter)


def is_ordinary(x: Any) -> bool:
    """Whether a Function of ours may take x: no tensor subclass, no functorch, no tracing."""
    return (
        type(x) in PLAIN
        and not torch._C._are_functorch_transforms_active()
        and not torch.compiler.is_compiling()
    )


def rows(tensor: Tensor) -> Tensor:
    """(..., n) as (rows, n): a view where the strides allow one."""
    if tensor.dim() == 2:
        return tensor
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.flatten(0, -2)
