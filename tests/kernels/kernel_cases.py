"""The Triton kernels, in Triton's interpreter or on a GPU; test_kernels.py runs this file.

Errors are relative to the largest value of the fp64 reference. Tolerances: fp32 sums of these sizes
were off by 3e-7 at most; a 16-bit result is rounded once, by 2⁻⁹ or 2⁻¹². Tensor cores truncate as
they add products of 16-bit operands: ten times as much is allowed there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.compiler.errors import CompilationError

from zbpipe.errors import ConfigError
from zbpipe.kernels import (
    bias_grad,
    dgrad,
    dispatch,
    embedding_grad,
    expert_wgrad,
    norm_dgrad,
    norm_wgrad,
    tables,
    target,
    tune,
    wgrad,
)

HERE = target.architecture(torch.device("cpu" if target.interpreting() else "cuda", 0))
DEVICE = "cpu" if target.interpreting() else "cuda"

# (dtype, atol, rtol) of a result in that dtype; sums into fp32 are held to SUM whatever they add.
TOLERANCES = [
    (torch.float32, 1e-6, 1e-6),
    (torch.float16, 1e-3, 1e-3),
    (torch.bfloat16, 1e-2, 1e-2),
]
DTYPES = [dtype for dtype, _, _ in TOLERANCES]
SUM = (1e-6, 1e-6)


def sum_of_products(dtype: torch.dtype) -> tuple[float, float]:
    """(atol, rtol) of a product's fp32 sum."""
    truncated = DEVICE == "cuda" and dtype != torch.float32
    return (1e-5, 1e-5) if truncated else SUM


# Around the tile edges 16, 32 and 128, and no multiples of 16; with 48 × 64 TMA can address all.
SHAPES = [(1, 1, 1), (17, 1, 33), (1, 17, 127), (129, 16, 32), (127, 129, 17), (40, 48, 64)]
TMA = tables.Config(16, 16, 32, 4, 2, "small, for the interpreter", tma=True, group=2)
POINTERS = tables.INTERPRETED


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def assert_close(got: Tensor, want: Tensor, atol: float, rtol: float) -> None:
    """Within atol of the reference's largest value plus rtol of each value; never NaN."""
    assert got.shape == want.shape
    if want.numel() == 0:
        return
    assert torch.isfinite(got).all()
    limit = atol * want.abs().max() + rtol * want.abs()
    error = (got.double() - want).abs()
    assert bool((error <= limit).all()), float((error - limit).max())


# --- dgrad ------------------------------------------------------------------------------------


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


# --- wgrad ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_wgrad(shape, dtype) -> None:
    rows, outs, ins = shape
    dY, X, dW = draw(rows, outs, dtype=dtype), draw(rows, ins, dtype=dtype, seed=1), draw(outs, ins)
    want = wgrad.reference(dW, dY, X)
    assert wgrad.wgrad(dW, dY, X) is dW
    assert_close(dW, want, *sum_of_products(dtype))


@settings(max_examples=60)
@given(
    rows=st.integers(1, 40),
    slots=st.integers(1, 4),
    numbers=st.data(),
    dtype=st.sampled_from(DTYPES),
    config=st.sampled_from([TMA, POINTERS]),
)
def test_a_group_has_the_bits_of_its_microbatches(rows, slots, numbers, dtype, config) -> None:
    first = numbers.draw(st.integers(0, slots - 1), "first")
    count = numbers.draw(st.integers(0, slots), "count")
    dY, X = draw(slots, rows, 24, dtype=dtype), draw(slots, rows, 40, dtype=dtype, seed=1)
    for slot in range(slots):  # what is not in the group must not be read
        if (slot - first) % slots >= count:
            dY[slot], X[slot] = torch.nan, torch.nan
    together, apart = draw(24, 40, seed=2), draw(24, 40, seed=2)
    want = wgrad.reference(together, dY, X, first, count)
    wgrad.wgrad(together, dY, X, first, count, config=config)
    for step in range(count):
        slot = (first + step) % slots
        wgrad.wgrad(apart, dY[slot], X[slot], config=config)
    assert torch.equal(together, apart)
    assert_close(together, want, *sum_of_products(dtype))


def test_descriptors_and_pointers_give_the_same_bits() -> None:
    dY, X = draw(2, 23, 48, dtype=torch.bfloat16), draw(2, 23, 64, dtype=torch.bfloat16)
    assert target.can_use_descriptors(dY, X)
    one, other = draw(48, 64), draw(48, 64)
    wgrad.wgrad(one, dY, X, 1, config=TMA)
    wgrad.wgrad(other, dY, X, 1, config=POINTERS)
    assert torch.equal(one, other)


def test_wgrad_with_strides() -> None:
    dY, X = draw(3, 9, 40)[:, :, 3:20], draw(9, 3, 64).transpose(0, 1)[:, :, 5:]
    into = torch.full((17, 80), torch.nan, device=DEVICE)
    into[:, 2:61] = draw(17, 59)
    want = wgrad.reference(into[:, 2:61], dY, X, 2, 2)
    wgrad.wgrad(into[:, 2:61], dY, X, 2, 2, config=TMA)
    assert_close(into[:, 2:61], want, *SUM)
    assert torch.isnan(into[:, :2]).all() and torch.isnan(into[:, 61:]).all()


@pytest.mark.parametrize("shape", [(2, 0, 5), (0, 4, 5), (2, 4, 0)])
def test_wgrad_of_nothing(shape) -> None:
    dW = draw(shape[2], 7)
    before = dW.clone()
    wgrad.wgrad(dW, draw(*shape), draw(*shape[:2], 7))
    assert torch.equal(dW, before)


# --- expert_wgrad -----------------------------------------------------------------------------


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


# --- sums over rows ---------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "outs"), [(1, 1), (17, 129), (129, 33), (300, 5), (0, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_grad(rows, outs, dtype) -> None:
    dY = draw(3, rows, outs, dtype=dtype)
    together, apart = draw(outs), draw(outs)
    want = bias_grad.reference(together, dY, 2, 3)
    bias_grad.bias_grad(together, dY, 2)
    for slot in (2, 0, 1):
        bias_grad.bias_grad(apart, dY[slot])
    assert torch.equal(together, apart)
    assert_close(together, want, *SUM)


def norm_of(rows: int, n: int, dtype: torch.dtype, centred: bool) -> tuple[Tensor, ...]:
    X, dY = draw(rows, n, dtype=dtype), draw(rows, n, dtype=dtype, seed=1)
    mean = X.float().mean(1) if centred else None
    x = X.float() if mean is None else X.float() - mean[:, None]
    return dY, X, (x.square().mean(1) + 1e-5).rsqrt(), mean


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(("rows", "n"), [(1, 5), (17, 129), (3, 64), (0, 5)])
@pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES)
def test_norm_dgrad(centred, rows, n, dtype, atol, rtol) -> None:
    dY, X, rstd, mean = norm_of(rows, n, dtype, centred)
    weight = draw(n, dtype=dtype)
    poisoned = torch.full((rows, n), torch.nan, dtype=dtype, device=DEVICE)
    norm_dgrad.norm_dgrad(dY, X, weight, rstd, mean, 1.0, out=poisoned)
    assert_close(poisoned, norm_dgrad.reference(dY, X, weight, rstd, mean, 1.0), atol, rtol)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (17, 129), (129, 33), (300, 5), (0, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_norm_wgrad(centred, rows, n, dtype, bias) -> None:
    dY, X, rstd, mean = norm_of(rows, n, dtype, centred)
    dW, db = draw(n), draw(n, seed=1) if bias else None
    want = norm_wgrad.reference(dW, db, dY, X, rstd, mean)
    norm_wgrad.norm_wgrad(dW, db, dY, X, rstd, mean)
    assert_close(dW, want[0], *SUM)
    if db is not None:
        assert_close(db, want[1], *SUM)


@pytest.mark.parametrize("padding_idx", [-1, 3])
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (17, 33), (40, 513), (0, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_grad(padding_idx, tokens, width, dtype) -> None:
    indices = torch.randint(7, (tokens,), generator=torch.Generator().manual_seed(tokens))
    indices = indices.to(DEVICE)
    dY, dW = draw(tokens, width, dtype=dtype), draw(9, width)
    again, want = dW.clone(), embedding_grad.reference(dW, dY, indices, padding_idx)
    embedding_grad.embedding_grad(dW, dY, indices, padding_idx)
    assert_close(dW, want, *SUM)
    # In the order of the tokens: bitwise what a loop of additions gives.
    for index, row in zip(indices.tolist(), dY, strict=True):
        if index != padding_idx:
            again[index] += row.float()
    assert torch.equal(dW, again)


# --- dispatch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_dispatch_runs_the_kernels_as_torch_would(dtype, monkeypatch) -> None:
    launched = []
    inside = []

    @contextlib.contextmanager
    def on_device_of(tensor):
        inside.append(tensor)
        yield
        inside.pop()

    monkeypatch.setattr(dispatch, "_on_device_of", on_device_of)
    for module in (dgrad, wgrad, expert_wgrad, bias_grad, norm_dgrad, norm_wgrad, embedding_grad):
        name = module.__name__.rpartition(".")[2]
        plain = getattr(module, name)

        def counted(*args, plain=plain, name=name, **kwargs):
            launched.append(name)
            assert any(inside[-1] is arg for arg in args), name
            return plain(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)
    measured = {"kernel": "dgrad", "architecture": HERE, "rows": 9, "outs": 16, "ins": 32}
    measured |= {"dtype": str(dtype).split(".")[1], "config": dataclasses.asdict(POINTERS)}
    both = [measured, measured | {"kernel": "wgrad"}]
    monkeypatch.setattr(tables, "measured", lambda: tuple(both))
    results = []
    for by_triton in (True, False):
        tables.choose.cache_clear()
        monkeypatch.setattr(dispatch, "_by_triton", lambda tensor, on=by_triton: on)
        results.append(everything(dtype))
    tables.choose.cache_clear()
    wanted = ["bias_grad", "dgrad", "embedding_grad", "expert_wgrad", "norm_dgrad", "norm_wgrad"]
    assert sorted(launched) == [*wanted, "wgrad"]
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


OFFSETS = torch.tensor([2, 2, 8], dtype=torch.int32)
INDICES = torch.tensor([1, 6, 1, 0, 2, 3, 3, 5, 4])


def everything(dtype: torch.dtype) -> list[Tensor]:
    """A result of each function of dispatch.py, with a ring where it takes one."""
    dY, X, W = draw(3, 9, 16, dtype=dtype), draw(3, 9, 32, dtype=dtype), draw(16, 32, dtype=dtype)
    dW, db, dn, dm, table = draw(16, 32), draw(16), draw(32), draw(32, seed=1), draw(7, 16)
    rstd, mean = draw(9).abs(), draw(9, seed=1)
    experts = draw(3, 16, 32)
    dispatch.wgrad_(dW, dY, X, 1, 2)
    dispatch.expert_wgrad_(experts, dY[0], X[0], OFFSETS.to(DEVICE))
    dispatch.bias_grad_(db, dY, 2, 3)
    dispatch.norm_wgrad_(dn, dm, X[0], X[1], rstd, mean)
    dispatch.embedding_grad_(table, dY[0], INDICES.to(DEVICE), 5)
    dX = dispatch.norm_dgrad(X[0], X[1], W[0], rstd, mean, 1.0)
    return [dispatch.dgrad(dY[0], W), experts, dW, db, dn, dm, table, dX]


# --- tune -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", tune.KERNELS)
@pytest.mark.parametrize("winner", [0, 3])
def test_tune_enters_the_fastest_of_right_candidates(kernel, winner) -> None:
    timed = []

    def seconds_of(call) -> float:
        call()
        timed.append(call)
        return 1.0 if len(timed) - 1 == winner else 2.0

    entry = tune.measure(kernel, (40, 48, 64), torch.bfloat16, DEVICE, seconds_of)
    assert entry["seconds"] == 1.0 and entry["cublas_seconds"] == (2.0 if winner else 1.0)
    assert entry["config"]["triton"] == (winner > 0)
    assert (entry["rows"], entry["outs"], entry["ins"]) == (40, 48, 64)
    assert len(timed) > 5 and f"fastest of {len(timed)}" in entry["config"]["how"]


@pytest.mark.parametrize("kernel", tune.KERNELS)
def test_tune_passes_over_what_triton_cannot_compile(kernel, monkeypatch, capsys) -> None:
    module = {"dgrad": dgrad, "wgrad": wgrad}[kernel]
    plain, asked = getattr(module, kernel), []

    def failing(*args, config):
        asked.append(config)
        if len(asked) == 1:
            raise CompilationError(None, None, "too large a tile")
        return plain(*args, config=config)

    monkeypatch.setattr(module, kernel, failing)
    entry = tune.measure(kernel, (40, 48, 64), torch.bfloat16, DEVICE, lambda call: 1.0)
    assert len(asked) > 5 and f"fastest of {len(set(asked))} on" in entry["config"]["how"]
    said = capsys.readouterr().err
    assert f"{kernel} torch.bfloat16 (40, 48, 64)" in said and "too large a tile" in said


def test_what_tune_enters_can_be_launched(tmp_path, monkeypatch) -> None:
    """Also where cuBLAS won and the entry has no tiles; with tiles from the tables."""
    path, timed = tmp_path / "measured.json", itertools.count()
    for kernel in tune.KERNELS:
        won = tune.measure(kernel, (40, 48, 64), torch.bfloat16, DEVICE, lambda _: next(timed))
        assert won["config"]["rows"] == 0 and not won["config"]["triton"]
        tune.enter(won, path)
    monkeypatch.setattr(tables, "measured", lambda: tuple(json.loads(path.read_text())["entries"]))
    for module in (dgrad, wgrad, expert_wgrad):
        monkeypatch.setattr(module, "interpreting", lambda: False)
    tables.choose.cache_clear()
    dY, X, W = (draw(*s, dtype=torch.bfloat16) for s in ((40, 48), (40, 64), (48, 64)))
    dW, experts = draw(48, 64), draw(1, 48, 64)
    want = [
        wgrad.reference(dW, dY, X),
        expert_wgrad.reference(experts, dY, X, torch.tensor([40])),
    ]
    wgrad.wgrad(dW, dY, X)
    expert_wgrad.expert_wgrad(experts, dY, X, torch.tensor([40]).int().to(DEVICE))
    tables.choose.cache_clear()
    for got, wanted in zip((dW, experts), want, strict=True):
        assert_close(got, wanted, *sum_of_products(torch.bfloat16))
    assert_close(dgrad.dgrad(dY, W), dgrad.reference(dY, W), 1e-2, 1e-2)


def test_tune_refuses_a_wrong_candidate(monkeypatch) -> None:
    monkeypatch.setattr(dgrad, "dgrad", lambda dY, W, config: dY @ W + 1)
    with pytest.raises(RuntimeError, match="differs from cuBLAS"):
        tune.measure("dgrad", (40, 48, 64), torch.float32, DEVICE, lambda call: 1.0)


# --- misuse -----------------------------------------------------------------------------------

X, Y, G = draw(2, 6, 4), draw(2, 6, 3), draw(3, 4)
MISUSE = {
    "dY is torch.float64": lambda: dgrad.dgrad(Y[0].double(), G.double()),
    r"W has shape \(4, 3\): must be \(3, any\)": lambda: dgrad.dgrad(Y[0], G.t().contiguous()),
    "W is torch.float16 and dY is torch.float32": lambda: dgrad.dgrad(Y[0], G.half()),
    "W has strides": lambda: dgrad.dgrad(Y[0], draw(3, 8)[:, ::2]),
    "dY has strides": lambda: dgrad.dgrad(draw(3, 6).t(), G),
    r"out has shape \(6, 5\)": lambda: dgrad.dgrad(Y[0], G, out=draw(6, 5)),
    "out is torch.float16": lambda: dgrad.dgrad(Y[0], G, out=draw(6, 4).half()),
    "dW is torch.bfloat16: a main gradient": lambda: wgrad.wgrad(G.bfloat16(), Y, X),
    r"dW has shape \(4, 3\)": lambda: wgrad.wgrad(draw(4, 3), Y, X),
    r"X has shape \(2, 5, 4\)": lambda: wgrad.wgrad(G, Y, draw(2, 5, 4)),
    "X is torch.float16 and dY": lambda: wgrad.wgrad(G, Y, X.half()),
    "first = 2: must be a slot, 0 to 1": lambda: wgrad.wgrad(G, Y, X, 2),
    "count = 3: must be 0 to 2": lambda: wgrad.wgrad(G, Y, X, 0, 3),
    r"dY has shape \(6,\)": lambda: wgrad.wgrad(G, draw(6), X),
    r"db has shape \(4,\)": lambda: bias_grad.bias_grad(draw(4), Y),
    "first = -1": lambda: bias_grad.bias_grad(draw(3), Y, -1),
    "rstd is torch.float16": lambda: norm_dgrad.norm_dgrad(X[0], X[1], X[0, 0], draw(6).half()),
    r"mean has shape \(5,\)": lambda: norm_wgrad.norm_wgrad(
        draw(4), None, X[0], X[1], draw(6), draw(5)
    ),
    "at most 16384": lambda: norm_dgrad.norm_dgrad(
        draw(1, 16385), draw(1, 16385), draw(16385), draw(1)
    ),
    "offsets is torch.int64": lambda: expert_wgrad.expert_wgrad(
        draw(2, 3, 4), Y[0], X[0], torch.tensor([3, 6])
    ),
    r"offsets has shape \(3,\)": lambda: expert_wgrad.expert_wgrad(
        draw(2, 3, 4), Y[0], X[0], torch.tensor([3, 6, 6]).int()
    ),
    r"dW has shape \(2, 4, 3\)": lambda: expert_wgrad.expert_wgrad(
        draw(2, 4, 3), Y[0], X[0], torch.tensor([3, 6]).int()
    ),
    "indices is torch.int32": lambda: embedding_grad.embedding_grad(
        draw(9, 3), Y[0], torch.zeros(6, dtype=torch.int32)
    ),
    r"dW has shape \(9, 4\)": lambda: embedding_grad.embedding_grad(
        draw(9, 4), Y[0], torch.zeros(6, dtype=torch.int64)
    ),
}


@pytest.mark.parametrize("message", MISUSE)
def test_misuse_names_the_argument(message) -> None:
    with pytest.raises(ConfigError, match=message):
        MISUSE[message]()
