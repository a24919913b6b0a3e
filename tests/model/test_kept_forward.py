"""A module's stand-in that someone kept from F and calls when nothing is deferred."""

from __future__ import annotations

import copy

import pytest
import torch
from splitting import assert_close
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from zbpipe.model.split import Deferred, Splitter


class Scaled(nn.Linear):
    """No rule takes its forward's place: one watches it for products."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * nn.functional.linear(x, self.weight, self.bias)


Scaled.__module__ = "transformers.scaled"  # so that its forward is tried


class Keeps(nn.Module):
    """Keeps the forward that its layer has in F."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.kept = layer, []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(self.layer.forward)
        return self.layer(x)


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (lambda: nn.Linear(6, 6), lambda f, x: f(x)),
        (lambda: nn.Linear(6, 6), lambda f, x: f(input=x)),
        (lambda: Conv1D(6, 6), lambda f, x: f(x)),
        (lambda: nn.LayerNorm(6), lambda f, x: f(x)),
        (lambda: Scaled(6, 6), lambda f, x: f(x)),
    ],
)
def test_a_forward_kept_from_f_is_the_modules_own_later(make, call) -> None:
    stage = Keeps(make()).double()
    plain, entry = copy.deepcopy(stage.layer), Deferred()
    splitter = Splitter(stage, norms=True)
    assert not splitter.report().not_split
    x, dY = (torch.randn(3, 6, dtype=torch.float64) for _ in range(2))
    with splitter.active(entry):
        stage(x)
    assert stage.kept[0] != stage.layer.forward
    y = call(stage.kept[0], x)
    y.backward(dY)
    assert len(entry) == 0
    want = plain(x)
    want.backward(dY)
    assert_close(y, want, 1e-12)
    for p, q in zip(stage.layer.parameters(), plain.parameters(), strict=True):
        assert_close(p.grad, q.grad, 1e-12)


def test_a_checkpoint_that_kept_it_runs_again_outside_of_a_step() -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.a.forward, x, use_reentrant=True)

    stage, entry = Stage().double(), Deferred()
    plain = copy.deepcopy(stage.a)
    x, dY = (torch.randn(3, 6, dtype=torch.float64) for _ in range(2))
    with Splitter(stage).active(entry):
        y = stage(x.requires_grad_())
    y.backward(dY)
    plain(x.detach()).backward(dY)
    assert len(entry) == 0
    for p, q in zip(stage.a.parameters(), plain.parameters(), strict=True):
        assert_close(p.grad, q.grad, 1e-12)
