"""Convolutions through the split: strides, padding, dilation, groups, dimensions, frozen parts."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from splitting import assert_same_training
from torch import nn

from zbpipe.model.split import Deferred, Splitter

KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    dims=st.integers(1, 3),
    numbers=st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(0, 2), st.integers(1, 2)),
    groups=st.sampled_from([1, 2]),
    bias=st.booleans(),
    frozen=st.sampled_from([None, "weight", "bias"]),
    batched=st.booleans(),
    needs_dx=st.booleans(),
)
def test_a_convolution_matches_autograd(
    dims, numbers, groups, bias, frozen, batched, needs_dx
) -> None:
    torch.manual_seed(0)
    kernel, stride, padding, dilation = numbers
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    layer = KINDS[dims - 1](2, 4, kernel, bias=bias, **options).double()
    assert Splitter(layer).report().deferred_share == 1
    if frozen and getattr(layer, frozen) is not None:
        getattr(layer, frozen).requires_grad_(False)
    shape = ((2,) if batched else ()) + (2,) + (7,) * dims
    xs = [torch.randn(shape, dtype=torch.float64).requires_grad_(needs_dx) for _ in range(2)]
    assert_same_training(layer, xs, [torch.randn_like(layer(x)) for x in xs])


def test_other_paddings_stay_in_i() -> None:
    for layer in (
        nn.Conv1d(2, 2, 3, padding="same"),
        nn.Conv2d(2, 2, 3, 1, 1, padding_mode="reflect"),
    ):
        ((_, reason),) = Splitter(layer).report().not_split
        assert "padding" in reason


def test_autocast_and_second_derivatives_are_autograds() -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv1d(4, 4, 3), torch.randn(2, 4, 9, requires_grad=True)
    got = []
    for excluded in (list(layer.parameters()), []):
        layer.zero_grad()
        entry = Deferred()
        with Splitter(layer, excluded).active(entry):
            with torch.autocast("cpu", torch.bfloat16):
                y = layer(x)
            y.float().square().sum().backward()
            (slope,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        entry.run()
        got.append((y, slope, layer.weight.grad, layer.bias.grad))
    for a, b in zip(*got, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
