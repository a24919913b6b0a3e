"""dX and dW in Triton: test_kernels.py runs this file, interpreted or on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from drawing import (
    DEVICE,
    DTYPES,
    POINTERS,
    SUM,
    TMA,
    TOLERANCES,
    assert_close,
    draw,
    sum_of_products,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from zbpipe.kernels import dgrad, expert_wgrad, tables, target, wgrad

# Around the tile edges 16, 32 and 128, and no multiples of 16; with 48 × 64 TMA can address all.
SHAPES = [(1, 1, 1), (17, 1, 33), (1, 17, 127), (129, 16, 32), (127, 129, 17), (40, 48, 64)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES)
def test_dgrad(shape, dtype, atol, rtol) -> None:
    rows, outs, ins = shape
    dY, W = draw(rows, outs, dtype=dtype), draw(outs, ins, dtype=dtype)
    poisoned = torch.full((rows, ins), torch.nan, dtype=dtype, device=DEVICE)
    assert dgrad.dgrad(dY, W, out=poisoned) is poisoned
    assert_close(poisoned, dgrad.reference(dY, W), atol, rtol)


@pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES)
def test_dgrad_through_descriptors(dtype, atol, rtol) -> None:
    dY, W = draw(41, 48, dtype=dtype), draw(48, 72, dtype=dtype)
    poisoned = torch.full((41, 72), torch.nan, dtype=dtype, device=DEVICE)
    dgrad.dgrad(dY, W, out=poisoned, config=TMA)
    assert_close(poisoned, dgrad.reference(dY, W), atol, rtol)
    # What descriptors cannot address takes the pointer kernel: the same bits.
    assert torch.equal(poisoned, dgrad.dgrad(dY, W, config=POINTERS))


def test_dgrad_with_strides() -> None:
    dY, W = draw(9, 40)[:, 3:20], draw(23, 17).t()
    assert not target.can_use_descriptors(dY)
    out = torch.full((9, 64), torch.nan, device=DEVICE)
    dgrad.dgrad(dY, W, out=out[:, 7:30], config=TMA)
    assert_close(out[:, 7:30], dgrad.reference(dY, W), 1e-6, 1e-6)
    assert torch.isnan(out[:, :7]).all() and torch.isnan(out[:, 30:]).all()


def test_dgrad_of_no_tokens() -> None:
    assert dgrad.dgrad(draw(0, 5), draw(5, 7)).shape == (0, 7)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_wgrad(shape, dtype) -> None:
    rows, outs, ins = shape
    dY, X, dW = draw(rows, outs, dtype=dtype), draw(rows, ins, dtype=dtype, seed=1), draw(outs, ins)
    want = wgrad.reference(dW, dY, X)
    assert wgrad.wgrad(dW, dY, X) is dW
    assert_close(dW, want, *sum_of_products(dtype))


def microbatch(rows: int, outs: int, ins: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """dY and X, with NaN behind their last row, which must not be read."""
    return [
        torch.cat([draw(rows, n, dtype=dtype, seed=seed), draw(1, n, dtype=dtype) * torch.nan])[:-1]
        for n in (outs, ins)
    ]


@pytest.fixture
def launches(monkeypatch):
    """How many microbatches each launch took."""
    counts = []
    plain = wgrad._launch
    monkeypatch.setattr(
        wgrad,
        "_launch",
        lambda dW, pairs, *rest: counts.append(len(pairs)) or plain(dW, pairs, *rest),
    )
    return counts


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.integers(0, 40), max_size=2 * tables.MOST + 1),
    sizes=st.sampled_from([(24, 40), (17, 33), (48, 64), (1, 129)]),
    dtype=st.sampled_from(DTYPES),
    config=st.sampled_from([TMA, POINTERS, None]),
)
def test_a_group_has_the_bits_of_its_microbatches(launches, rows, sizes, dtype, config) -> None:
    pairs = [microbatch(n, *sizes, dtype, m) for m, n in enumerate(rows)]
    dY, X = ([pair[i] for pair in pairs] for i in (0, 1))
    together, apart = draw(*sizes, seed=2), draw(*sizes, seed=2)
    want = wgrad.reference(together, dY, X)
    launches.clear()
    assert wgrad.wgrad(together, dY, X, config=config) is together
    many = sum(n > 0 for n in rows)
    if dtype == torch.float32:
        assert launches == [1] * many
    elif config is not TMA or able(sizes):
        whole, rest = divmod(many, tables.MOST)
        assert launches == [tables.MOST] * whole + [rest] * (rest > 0)
    for y, x in pairs:
        wgrad.wgrad(apart, y, x, config=config)
    assert torch.equal(together, apart)
    assert_close(together, want, *sum_of_products(dtype))


def able(sizes: tuple[int, int]) -> bool:
    return all(n % 8 == 0 for n in sizes)


def test_what_lies_otherwise_is_a_launch_of_its_own(launches) -> None:
    """Row strides, and operands that descriptors cannot address, in the midst of others."""
    dtype = torch.bfloat16
    pairs = [microbatch(9, 48, 64, dtype, m) for m in range(2)]
    pairs += [[draw(9, 80, dtype=dtype)[:, 16:64], draw(9, 64, dtype=dtype)] for _ in range(2)]
    pairs += [[draw(9, 81, dtype=dtype)[:, 1:49], draw(9, 64, dtype=dtype)]]
    pairs += [[draw(64, 9, dtype=dtype)[:48].t().contiguous(), draw(9, 64, dtype=dtype)]]
    together, apart = draw(48, 64), draw(48, 64)
    dY, X = ([pair[i] for pair in pairs] for i in (0, 1))
    want = wgrad.reference(together, dY, X)
    wgrad.wgrad(together, dY, X, config=TMA)
    assert launches == [2, 2, 1, 1]
    for y, x in pairs:
        wgrad.wgrad(apart, y, x, config=TMA)
    assert torch.equal(together, apart)
    assert_close(together, want, *sum_of_products(dtype))


def test_microbatches_with_other_tiles_are_launches_of_their_own(launches, monkeypatch) -> None:
    """The tables may hold other tiles for a last, shorter microbatch: its bits stay its own."""
    monkeypatch.setattr(wgrad, "interpreting", lambda: False)
    other = dataclasses.replace(POINTERS, rows=32)
    monkeypatch.setattr(
        tables,
        "choose",
        lambda kernel, arch, dtype, shape, *_, **__: POINTERS if shape[0] > 8 else other,
    )
    pairs = [microbatch(n, 16, 32, torch.float16, n) for n in (20, 17, 5)]
    together, apart = draw(16, 32), draw(16, 32)
    wgrad.wgrad(together, *zip(*pairs, strict=True))
    assert launches == [2, 1]
    for y, x in pairs:
        wgrad.wgrad(apart, y, x)
    assert torch.equal(together, apart)


def test_descriptors_and_pointers_give_the_same_bits() -> None:
    pairs = [microbatch(n, 48, 64, torch.bfloat16, n) for n in (23, 40)]
    assert target.can_use_descriptors(*pairs[0])
    one, other = draw(48, 64), draw(48, 64)
    wgrad.wgrad(one, *zip(*pairs, strict=True), config=TMA)
    wgrad.wgrad(other, *zip(*pairs, strict=True), config=POINTERS)
    assert torch.equal(one, other)


def test_wgrad_with_strides() -> None:
    dY = [t[:, 3:20] for t in draw(2, 9, 40)]
    X = [t[:, 5:] for t in draw(9, 2, 64).transpose(0, 1)]
    into = torch.full((17, 80), torch.nan, device=DEVICE)
    into[:, 2:61] = draw(17, 59)
    want = wgrad.reference(into[:, 2:61], dY, X)
    wgrad.wgrad(into[:, 2:61], dY, X, config=TMA)
    assert_close(into[:, 2:61], want, *SUM)
    assert torch.isnan(into[:, :2]).all() and torch.isnan(into[:, 61:]).all()


@pytest.mark.parametrize("shape", [(2, 0, 5), (0, 4, 5), (2, 4, 0)])
def test_wgrad_of_nothing(shape) -> None:
    dW = draw(shape[2], 7)
    before = dW.clone()
    wgrad.wgrad(dW, list(draw(*shape)), list(draw(*shape[:2], 7)))
    assert torch.equal(dW, before)


@settings(max_examples=30)
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    spare=st.integers(0, 3),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    dtype=st.sampled_from(DTYPES),
)
def test_experts_have_the_bits_of_wgrad_for_each(counts, spare, sizes, dtype) -> None:
    outs, ins = sizes
    rows = sum(counts) + spare
    dY, X = draw(rows, outs, dtype=dtype), draw(rows, ins, dtype=dtype, seed=1)
    dY[rows - spare :], X[rows - spare :] = torch.nan, torch.nan
    offsets = torch.tensor(counts).cumsum(0).int().to(DEVICE)
    together, apart = draw(len(counts), outs, ins), draw(len(counts), outs, ins)
    want = expert_wgrad.reference(together, dY, X, offsets)
    expert_wgrad.expert_wgrad(together, dY, X, offsets, config=POINTERS)
    for expert, end in enumerate(offsets.tolist()):
        own = slice(end - counts[expert], end)
        wgrad.wgrad(apart[expert], dY[own], X[own], config=POINTERS)
    assert torch.equal(together, apart)
    assert_close(together, want, *sum_of_products(dtype))
