"""Time the layers of a model on a real input, leaving no trace in it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from .split import mute_hooks
from .stages import Layer

# The first run warms caches and allocators up; of the others the fastest is the layer's time.
_RUNS = 4


def layer_seconds(layers: Sequence[Layer], value: Any) -> list[float]:
    """Seconds of forward and backward of each layer, called one after the other on `value`.

    Gradients, buffers and the random generator are put back as they were.
    """
    times = []
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for _, module in layers:
            with untouched([module]):
                seconds, value = _time(module, value)
            times.append(seconds)
    return times


def _time(module: nn.Module, value: Any) -> tuple[float, Any]:
    best = float("inf")
    for _ in range(_RUNS):
        given = tree_map(_leaf, value)
        start = time.perf_counter()
        output = module(given)
        roots = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        best = min(best, time.perf_counter() - start)
    return best, tree_map(_detached, output)


def _leaf(value: Any) -> Any:
    """A fresh tensor that wants a gradient where it can have one, and may be changed in place."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().clone().requires_grad_().view_as(value)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


@contextmanager
def untouched(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put gradients and buffers of `modules` back as they were, and mute their gradient hooks."""
    parameters = [p for module in modules for p in module.parameters()]
    grads = [(p, p.grad) for p in parameters]
    buffers = [(b, b.detach().clone()) for module in modules for b in module.buffers()]
    for parameter in parameters:
        parameter.grad = None
    try:
        with mute_hooks(parameters):
            yield
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)
