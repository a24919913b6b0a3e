"""W of several microbatches at once: the bits of one after the other, in fewer launches."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from counting import kernels_counted
from zbpipe.model.rules.deferred import Groupable, Record, run_together
from zbpipe.model.rules.products import Products
from zbpipe.model.split import Deferred, Splitter, wide_gradients


class Stage(nn.Module):
    """Every kind of record; a Linear that is used twice, and an embedding tied to a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=2)
        self.up, self.again, self.down = nn.Linear(8, 12), nn.Linear(12, 12), Conv1D(8, 12)
        self.norm, self.conv = nn.LayerNorm(8), nn.Conv1d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.alone = nn.Linear(8, 8, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.up(self.embed(tokens))
        x = self.down(self.again(torch.tanh(self.again(x))))
        return self.head(self.alone(self.conv(self.norm(x).mT).mT))


def deferred(stage: nn.Module, lengths: list[int], dtype: torch.dtype) -> list[Deferred]:
    """F and I of a microbatch of each length, to W's that are still due."""
    generator = torch.Generator().manual_seed(0)
    splitter, entries = Splitter(stage, norms=True), []
    for length in lengths:
        tokens = torch.randint(11, (2, length), generator=generator)
        entries.append(Deferred())
        with splitter.active(entries[-1]):
            y = stage(tokens)
        with splitter.active(entries[-1]):
            y.backward(torch.randn(y.shape, generator=generator).to(dtype))
    return entries


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Counts the kernels that W and I run."""
    return kernels_counted(monkeypatch)


def results(lengths: list[int], dtype: torch.dtype, together: bool) -> list[Tensor]:
    torch.manual_seed(0)
    stage = Stage().to(dtype)
    with wide_gradients(stage.parameters()):
        entries = deferred(stage, lengths, dtype)
        if together:
            run_together(entries)
        for entry in entries:
            entry.run()  # nothing is left of those that ran together
        assert not any(entry._records for entry in entries)
        return [p.grad for p in stage.parameters() if p.grad is not None]


@given(
    lengths=st.lists(st.integers(1, 5), max_size=5),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
)
def test_together_has_the_bits_of_one_after_the_other(lengths, dtype) -> None:
    for a, b in zip(*(results(lengths, dtype, on) for on in (True, False)), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("lengths", [[3], [3, 3], [4, 1, 2, 5, 5]])
def test_each_weight_is_one_launch(as_on_a_gpu, lengths) -> None:
    got = results(lengths, torch.bfloat16, True)
    counts, n = as_on_a_gpu.copy(), len(lengths)
    as_on_a_gpu.clear()
    want = results(lengths, torch.bfloat16, False)
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)
    assert as_on_a_gpu["wgrad_"] == 6 * n and as_on_a_gpu["grouped_wgrad_"] == 0
    if n == 1:
        assert counts == as_on_a_gpu
        return
    # up, again (both its uses), down, alone; the tied weight alternates with its lookups.
    assert counts["grouped_wgrad_"] == 4 and counts["wgrad_"] == n
    for name in ("bias_grad_", "embedding_grad_", "norm_wgrad_", "norm_dgrad", "dgrad"):
        assert counts[name] == as_on_a_gpu[name] > 0, name


class Raw(nn.Module):
    """Products with views of one parameter, in both ways that it may lie."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(2, 8, 8, generator=generator).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.matmul(x, self.w[0]), self.w[1])


@pytest.mark.parametrize("strange", [True, False])
def test_views_of_a_parameter_are_grouped_in_its_order(as_on_a_gpu, strange) -> None:
    """Two views share a gradient, so their additions must not change places."""
    grads = []
    for together in (True, False):
        stage, entries = Raw(), []
        stage.w.main_grad = torch.ones(2, 8, 8).transpose(1, 2) if strange else torch.ones(2, 8, 8)
        for m in range(3):
            entries.append(Deferred())
            with Products(stage.parameters(), entries[-1]):
                y = stage(torch.full((2, 8), m + 1.0).bfloat16())
            y.backward(torch.ones(2, 8).bfloat16())
        as_on_a_gpu.clear()
        if together:
            run_together(entries)
        for entry in entries:
            entry.run()
        grads.append(stage.w.main_grad)
        assert as_on_a_gpu["grouped_wgrad_"] == (0 if strange else 6)
    assert torch.equal(*grads)


def test_an_autocast_microbatch_among_others_is_added_by_itself(as_on_a_gpu) -> None:
    """Operands of two dtypes are no group."""
    layer = nn.Linear(8, 4, bias=False)
    plain, entries = copy.deepcopy(layer), []
    for half in (True, False, True):
        for module in (layer, plain):
            entries.append(Deferred())
            x = torch.arange(16.0).view(2, 8)
            with (
                Splitter(module).active(entries[-1]),
                torch.autocast("cpu", torch.bfloat16, enabled=half),
            ):
                y = module(x)
            y.backward(torch.ones_like(y))
    run_together(entries[::2])
    for entry in entries[1::2]:
        entry.run()
    assert as_on_a_gpu["grouped_wgrad_"] == 0
    assert torch.equal(layer.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("make", [lambda: nn.Linear(8, 4, bias=False), Raw])
def test_what_a_kernel_takes_as_a_copy_only_is_added_by_itself(as_on_a_gpu, make) -> None:
    """An expanded dY, as a sum's backward makes it: one copy at a time."""
    grads = []
    for together in (True, False):
        torch.manual_seed(0)
        stage, entries = make().bfloat16(), []
        for p in stage.parameters():
            p.main_grad = torch.zeros(p.shape)
        for m in range(3):
            entries.append(Deferred())
            x = torch.full((2, 8), m + 1.0).bfloat16()
            with Splitter(stage).active(entries[-1]), Products(stage.parameters(), entries[-1]):
                y = stage(x)
            y.sum().backward()
        as_on_a_gpu.clear()
        if together:
            run_together(entries)
        for entry in entries:
            entry.run()
        grads += [p.main_grad for p in stage.parameters()]
        # Raw's first product has a dY that the second one's backward made.
        count = as_on_a_gpu["grouped_wgrad_"] + as_on_a_gpu["wgrad_"]
        assert count == (3 if make is not Raw else 6)
    assert torch.equal(*grads)


def test_a_groups_tensors_are_let_go_of_before_the_next_is_added() -> None:
    """As `run` does record by record: what a kernel needs while it runs comes on top of less."""
    seen: list[weakref.ref[Tensor]] = []
    alive = []

    class Watching(Groupable):
        def __init__(self, layer: nn.Linear) -> None:
            self.layer = layer

        @property
        def key(self) -> int:
            return id(self.layer)

        def __call__(self, X, dY) -> None:
            self.several([(X, dY)])

        def several(self, pairs) -> None:
            alive.append(sum(ref() is not None for ref in seen))

    stage = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    entries = [Deferred(), Deferred()]
    for entry in entries:
        for layer in stage:
            X = torch.zeros(3)
            seen.append(weakref.ref(X))
            entry.add(Record(Watching(layer), (layer.weight,), X, torch.zeros(3)))
    del X
    run_together(entries)
    assert alive == [4, 2]


def test_a_record_without_parameters_runs_too() -> None:
    """As in `run`: each by itself, at its place among those that begin a group."""
    ran = []

    def told(name: str):
        return lambda X, dY: ran.append(name)

    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    owned = {"a": (a,), "b": (b,)}
    entries, x = [Deferred(), Deferred()], torch.zeros(2)
    for entry, names in zip(entries, (["a", "none", "b"], ["none", "b", "a"]), strict=True):
        for name in names:
            entry.add(Record(told(name), owned.get(name, ()), x, x))
    run_together(entries)
    assert ran == ["a", "a", "none", "b", "b", "none"]
    assert not any(map(len, entries))
