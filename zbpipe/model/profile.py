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

    Hooks on gradients (`register_hook`) are mute, too; a `.main_grad` is out of sight.
    """
    parameters = [p for module in modules for p in module.parameters()]
    grads = [(p, p.grad) for p in parameters]
    buffers = [
        (owner, name, buffer, buffer.detach().clone())
        for module in modules
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    hooks = [(p._backward_hooks, dict(p._backward_hooks)) for p in parameters if p._backward_hooks]
    for live, _ in hooks:
        live.clear()  # in place: autograd holds this dict
    main = [(p, vars(p).pop("main_grad")) for p in parameters if "main_grad" in vars(p)]
    for parameter in parameters:
        parameter.grad = None
    try:
        with mute_hooks(parameters):
            yield
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
        for live, saved_hooks in hooks:
            live.update(saved_hooks)
        for parameter, tensor in main:
            parameter.main_grad = tensor  # type: ignore[attr-defined]
        with torch.no_grad():
            for owner, name, buffer, saved in buffers:
                owner._buffers[name] = buffer  # layers may have put another in its place
                if not torch.equal(buffer, saved):
                    buffer.copy_(saved)
