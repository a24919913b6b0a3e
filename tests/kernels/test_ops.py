"""The operators on CPU: against fp64, groups against their microbatches, fake and compiled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from zbpipe.errors import ConfigError
from zbpipe.kernels import ops

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def off(got: Tensor, want: Tensor) -> float:
    """The largest error relative to the largest value."""
    return float((got.double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_what_they_say(dtype) -> None:
    dY, X, W = draw(7, 3, dtype=dtype), draw(7, 4, dtype=dtype), draw(3, 4, dtype=dtype)
    assert off(ops.dgrad(dY, W), dY.double() @ W.double()) < ROUNDING[dtype]
    dW = draw(3, 4)
    want = dW.double() + dY.double().t() @ X.double()
    ops.wgrad_(dW, dY, X)
    assert off(dW, want) < 1e-6
    assert off(ops.wgrad(dY, X), dY.double().t() @ X.double()) < 1e-6


@given(rows=st.lists(st.integers(0, 9), max_size=6), dtype=st.sampled_from(DTYPES))
def test_a_group_is_the_sum_of_its_microbatches(rows, dtype) -> None:
    """As fp64 has it, to what rounding n products and their sums in fp32 comes to, in any order."""
    dY = [draw(n, 3, dtype=dtype, seed=m) for m, n in enumerate(rows)]
    X = [draw(n, 4, dtype=dtype, seed=m) for m, n in enumerate(rows)]
    dW = draw(3, 4)
    want, terms = dW.double(), dW.double().abs()
    for y, x in zip(dY, X, strict=True):
        want = want + y.double().t() @ x.double()
        terms = terms + y.double().abs().t() @ x.double().abs()
    ops.grouped_wgrad_(dW, dY, X)
    bound = (sum(rows) + len(rows) + 1) * torch.finfo(torch.float32).eps / 2 * terms
    assert bool(((dW - want).abs() <= bound).all())


def test_each_expert_gets_its_rows() -> None:
    dY, X, dW = draw(7, 3), draw(7, 4), draw(3, 3, 4)
    before = dW.clone()
    ops.expert_wgrad_(dW, dY, X, torch.tensor([4, 4, 6]).int())
    for expert, at in enumerate((slice(0, 4), slice(4, 4), slice(4, 6))):
        want = before[expert].double() + dY[at].double().t() @ X[at].double()
        assert off(dW[expert], want) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centred", [True, False])
def test_norms_are_autograds(dtype, centred) -> None:
    X, dY = draw(5, 6, dtype=dtype), draw(5, 6, dtype=dtype, seed=1)
    weight, bias = draw(6, dtype=dtype), draw(6, dtype=dtype)
    mean = X.float().mean(1) if centred else None
    x = X.float() if mean is None else X.float() - mean[:, None]
    rstd = (x.square().mean(1) + 1e-5).rsqrt()
    leaves = [t.double().requires_grad_() for t in (X, weight, bias)]
    if centred:
        y = torch.nn.functional.layer_norm(leaves[0], (6,), leaves[1], leaves[2], 1e-5)
    else:
        y = torch.nn.functional.rms_norm(leaves[0], (6,), leaves[1], 1e-5) + leaves[2]
    want = torch.autograd.grad(y, leaves, dY.double())
    assert off(ops.norm_dgrad(dY, X, weight, rstd, mean, 0.0), want[0]) < ROUNDING[dtype]
    dW, db = torch.zeros(6), torch.zeros(6)
    ops.norm_wgrad_(dW, db, dY, X, rstd, mean)
    ops.norm_wgrad_(dW, None, dY, X, rstd, mean)
    assert off(dW, 2 * want[1]) < 1e-6 and off(db, want[2]) < 1e-6


@pytest.mark.parametrize("padding_idx", [-1, 3])
def test_an_embedding_is_autograds(padding_idx) -> None:
    indices, dY = torch.tensor([3, 1, 3, 0, 6]), draw(5, 4)
    table = draw(7, 4).double().requires_grad_()
    padding = None if padding_idx < 0 else padding_idx
    torch.nn.functional.embedding(indices, table, padding).backward(dY.double())
    dW = torch.zeros(7, 4)
    ops.embedding_grad_(dW, dY, indices, padding_idx)
    assert off(dW, table.grad) < 1e-6


def test_second_derivatives() -> None:
    """Of a gradient penalty: |dX|² and |dW|² by their operands, against plain torch."""
    leaves = [draw(7, 3).requires_grad_(), draw(3, 4).requires_grad_(), draw(7, 4).requires_grad_()]
    dY, W, X = leaves
    got = ops.dgrad(dY, W).square().sum() + ops.wgrad(dY, X).square().sum()
    want = (dY @ W).square().sum() + (dY.t() @ X).square().sum()
    for g, w in zip(
        torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), strict=True
    ):
        torch.testing.assert_close(g, w)


CALLS = {
    "dgrad": lambda: (draw(7, 3).requires_grad_(), draw(3, 4).requires_grad_()),
    "wgrad": lambda: (draw(7, 3).requires_grad_(), draw(7, 4).requires_grad_()),
    "wgrad_": lambda: (draw(3, 4), draw(7, 3), draw(7, 4)),
    "grouped_wgrad_": lambda: (
        draw(3, 4),
        [draw(7, 3), draw(2, 3)],
        [draw(7, 4), draw(2, 4)],
    ),
    "expert_wgrad_": lambda: (draw(2, 3, 4), draw(7, 3), draw(7, 4), torch.tensor([4, 6]).int()),
    "bias_grad_": lambda: (draw(3), draw(7, 3)),
    "norm_dgrad": lambda: (draw(7, 4), draw(7, 4), draw(4), draw(7), draw(7), 1.0),
    "norm_wgrad_": lambda: (draw(4), draw(4), draw(7, 4), draw(7, 4), draw(7), None),
    "embedding_grad_": lambda: (draw(9, 4), draw(5, 4), torch.tensor([1, 2, 2, 0, 8])),
}


@pytest.mark.parametrize("name", CALLS)
def test_torch_finds_nothing_wrong_with_the_operator(name) -> None:
    torch.library.opcheck(getattr(torch.ops.zbpipe, name).default, CALLS[name]())


@pytest.mark.parametrize("name", ["dgrad", "wgrad", "norm_dgrad"])
def test_fake_tensors_have_the_real_ones_shape_and_dtype(name) -> None:
    args = [a.detach() if isinstance(a, Tensor) else a for a in CALLS[name]()]
    real = getattr(ops, name)(*args)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
        fake = getattr(ops, name)(*fakes)
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.dgrad(draw(7, 3), draw(4, 3)), r"W has shape \(4, 3\): must be \(3, any\)"),
        (lambda: ops.dgrad(draw(7, 3), draw(3, 4).double()), "W is torch.float64"),
        (lambda: ops.wgrad_(draw(3, 4).half(), draw(7, 3), draw(7, 4)), "dW is torch.float16"),
        (lambda: ops.wgrad_(draw(3, 4), draw(7, 3), draw(6, 4)), r"X has shape \(6, 4\)"),
        (
            lambda: ops.grouped_wgrad_(draw(3, 4), [draw(7, 3)] * 2, [draw(7, 4), draw(6, 4)]),
            r"X\[1\] has shape \(6, 4\)",
        ),
        (lambda: ops.grouped_wgrad_(draw(3, 4), [draw(7, 3)], []), "X has 0 microbatches and dY"),
        (lambda: ops.bias_grad_(draw(3), draw(2, 7, 3)), r"dY has shape \(2, 7, 3\)"),
        (lambda: ops.embedding_grad_(draw(9, 4), draw(5, 4), torch.ones(5)), "indices is"),
    ],
)
def test_misuse_names_the_argument(call, message) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.fixture(params=["aot_eager", "inductor"])
def compiled(request):
    """`compiled(f)`: as one graph, or it fails; counts compilations from none."""
    torch._dynamo.reset()
    yield lambda f: torch.compile(f, backend=request.param, fullgraph=True)
    torch._dynamo.reset()


def test_i_and_w_compile_to_one_graph(compiled) -> None:
    """dX and all that W adds, with gradients that are there already."""

    def backward(dY, X, W, offsets, indices, rstd, dW, experts, db, dn, table):
        dX = ops.dgrad(dY, W)
        ops.wgrad_(dW, dY, X)
        ops.grouped_wgrad_(dW, [dY, dY[:2]], [X, X[:2]])
        ops.expert_wgrad_(experts, dY, X, offsets)
        ops.bias_grad_(db, dY)
        ops.norm_wgrad_(dn, None, X, X, rstd, None)
        ops.embedding_grad_(table, dY, indices)
        return dX + ops.norm_dgrad(X, X, W[0], rstd, None, 1.0)

    dY, X, W, rstd = draw(7, 3), draw(7, 4), draw(3, 4), draw(7).abs()
    given = (dY, X, W, torch.tensor([4, 6]).int(), torch.tensor([1, 2, 2, 0, 8, 1, 1]), rstd)
    sums = [[draw(3, 4), draw(2, 3, 4), draw(3), draw(4), draw(9, 3)] for _ in range(2)]
    got = compiled(backward)(*given, *sums[0])
    want = backward(*given, *sums[1])
    for g, w in zip((got, *sums[0]), (want, *sums[1]), strict=True):
        torch.testing.assert_close(g, w)


def test_a_layer_made_of_the_operators_compiles_with_its_backward(compiled) -> None:
    def loss(dY, W, X):
        return (ops.dgrad(dY, W).square().sum() + ops.wgrad(dY, X).square().sum()).sqrt()

    leaves = [draw(7, 3).requires_grad_(), draw(3, 4).requires_grad_(), draw(7, 4).requires_grad_()]
    want = torch.autograd.grad(loss(*leaves), leaves)
    got = torch.autograd.grad(compiled(loss)(*leaves), leaves)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


def test_below_autograd_nothing_is_recorded() -> None:
    dY, W = draw(7, 3).requires_grad_(), draw(3, 4)
    with ops.below_autograd():
        assert not ops.dgrad(dY, W).requires_grad
    assert ops.dgrad(dY, W).requires_grad
