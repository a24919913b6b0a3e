"""Runs a module plainly and split, microbatch by microbatch, and compares what comes out."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zbpipe.model.split import Deferred, Splitter

Gradients = dict[str, Tensor | None]


def gradients(module: nn.Module) -> Gradients:
    """A copy of every parameter's `.grad` by qualified name."""
    return {
        name: None if p.grad is None else p.grad.detach().clone()
        for name, p in module.named_parameters()
    }


def first_tensor(output: object) -> Tensor:
    """The tensor of a module's output: itself, or the first of a tuple."""
    tensor = output[0] if isinstance(output, tuple) else output
    assert isinstance(tensor, Tensor)
    return tensor


def run_plain(module: nn.Module, xs: Sequence[Tensor], dYs: Sequence[Tensor]) -> list[Tensor]:
    """Ordinary backward over the microbatches; returns outputs and input gradients."""
    seen = []
    for x, dY in zip(xs, dYs, strict=True):
        x = x.detach().requires_grad_(x.requires_grad)
        y = first_tensor(module(x))
        seen.append(y.detach())
        if y.requires_grad:
            torch.autograd.backward(y, dY)
        if x.grad is not None:
            seen.append(x.grad)
    return seen


def run_split(
    module: nn.Module,
    xs: Sequence[Tensor],
    dYs: Sequence[Tensor],
    *,
    fused: bool,
    delay: int = 0,
    splitter: Splitter | None = None,
) -> list[Tensor]:
    """As `run_plain` through a Splitter; W of microbatch i runs after I of i + delay."""
    splitter = splitter or Splitter(module)
    seen, entries = [], []
    for x, dY in zip(xs, dYs, strict=True):
        x = x.detach().requires_grad_(x.requires_grad)
        entry = Deferred(fused=fused)
        with splitter.active(entry):
            y = first_tensor(module(x))
        seen.append(y.detach())
        with splitter.active(entry):
            if y.requires_grad:
                torch.autograd.backward(y, dY)
        if x.grad is not None:
            seen.append(x.grad)
        entries.append(entry)
        if len(entries) > delay:
            entries.pop(0).run()
    for entry in entries:
        entry.run()
    return seen


def assert_close(got: Tensor | None, want: Tensor | None, tolerance: float, name: str = "") -> None:
    """Equal within `tolerance` of the wanted tensor's largest magnitude, and laid out alike."""
    assert (got is None) == (want is None), f"{name}: {got} instead of {want}"
    if got is None or want is None:
        return
    assert got.shape == want.shape and got.dtype == want.dtype, name
    if want.numel():
        error = (got - want).abs().max().item()
        assert error <= tolerance * max(want.abs().max().item(), 1e-30), f"{name}: off by {error}"


def assert_same_training(
    module: nn.Module,
    xs: Sequence[Tensor],
    dYs: Sequence[Tensor],
    tolerance: float = 1e-12,
    delay: int = 1,
    bitwise: bool = True,
) -> None:
    """Plain, B and I + W agree on outputs, input gradients and weight gradients; B and I + W also
    give the same bits, unless autograd makes a part of a deferred parameter's gradient itself.

    Two rounds, the second on top of the first one's gradients.
    """
    plain, fused, split = (copy.deepcopy(module) for _ in range(3))  # without .grad
    for _ in range(2):
        want = run_plain(plain, xs, dYs)
        for other, is_fused in ((fused, True), (split, False)):
            got = run_split(other, xs, dYs, fused=is_fused, delay=delay)
            assert len(got) == len(want)
            for g, w in zip(got, want, strict=True):
                assert_close(g, w, tolerance)
            for (name, g), w in zip(
                gradients(other).items(), gradients(plain).values(), strict=True
            ):
                assert_close(g, w, tolerance, name)
        if not bitwise:
            continue
        for (name, a), b in zip(gradients(fused).items(), gradients(split).values(), strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b), f"{name}: B and I + W differ"
