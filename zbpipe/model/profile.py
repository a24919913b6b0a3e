"""Run a model for its costs, leaving no trace in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from .split import mute_hooks


@contextmanager
def untouched(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put gradients and buffers of `modules` back as they were, and mute their gradient hooks.

    A `.main_grad` is out of sight meanwhile.
    """
    parameters = [p for module in modules for p in module.parameters()]
    grads = [(p, p.grad) for p in parameters]
    buffers = [(b, b.detach().clone()) for module in modules for b in module.buffers()]
    main = [(p, vars(p).pop("main_grad")) for p in parameters if "main_grad" in vars(p)]
    for parameter in parameters:
        parameter.grad = None
    try:
        with mute_hooks(parameters):
            yield
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
        for parameter, tensor in main:
            parameter.main_grad = tensor  # type: ignore[attr-defined]
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)
