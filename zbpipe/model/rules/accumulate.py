"""How W adds to a gradient: in place, in the gradient's own dtype and layout."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .engine import rows

_LOW = (torch.bfloat16, torch.float16)
_FLOATS = (*_LOW, torch.float32)
Pair = tuple[Tensor, Tensor]


class View(NamedTuple):
    """A part of a parameter as a strided view of it; `offset` is relative to the parameter."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, part: Tensor, parameter: Parameter) -> View:
        """Where `part`, a view of the parameter, lies in it."""
        offset = int(part.storage_offset()) - int(parameter.storage_offset())
        return cls(tuple(part.size()), tuple(part.stride()), offset)

    def on(self, whole: Tensor) -> Tensor:
        """The same part of a tensor that is laid out as the parameter is."""
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)

    def transposed(self) -> View:
        """The view with its last two dimensions exchanged."""
        size, stride = list(self.size), list(self.stride)
        size[-2:], stride[-2:] = size[:-3:-1], stride[:-3:-1]
        return View(tuple(size), tuple(stride), self.offset)


def laid_out(unpacked: Tensor, parameter: Parameter) -> Tensor:
    """The parameter's values as its views lie: saved_tensors_hooks may give back another layout."""
    if unpacked.stride() == parameter.stride():
        return unpacked
    return torch.empty_like(parameter).copy_(unpacked)


def gradient_dtype(parameter: Parameter) -> torch.dtype | None:
    """The dtype `.grad` must have; None means any (torch ≥ 2.9 lets users choose it)."""
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", parameter.dtype)
    return dtype


def gradient(parameter: Parameter) -> Tensor | None:
    """The tensor that W adds to: `.main_grad` if the parameter has one, else `.grad`, dense.

    A sparse `.grad` (a functional sparse embedding made it) becomes dense.
    """
    main: Tensor | None = getattr(parameter, "main_grad", None)
    if main is not None:
        return main
    grad = parameter.grad
    if grad is not None and grad.layout != torch.strided:
        grad = parameter.grad = grad.to_dense()
    return grad


def sum_dtype(parameter: Parameter, operand: Tensor) -> torch.dtype:
    """The dtype to compute this parameter's gradient in, from operands of `operand.dtype`.

    The operands' own, as autograd does, unless a low-precision parameter has a wider gradient: then
    the gradient's, so that a microbatch's part is not rounded before it is added.
    """
    if parameter.dtype != operand.dtype:
        return operand.dtype  # autocast
    return torch.promote_types(_wanted_dtype(parameter) or operand.dtype, operand.dtype)


def _wanted_dtype(parameter: Parameter) -> torch.dtype | None:
    main: Tensor | None = getattr(parameter, "main_grad", None)
    return gradient_dtype(parameter) if main is None else main.dtype


def assign(parameter: Parameter, fresh: Tensor) -> None:
    """Make `fresh`, which nobody else holds, the `.grad`, laid out as autograd would."""
    fresh = fresh.to(gradient_dtype(parameter) or fresh.dtype)
    if not parameter.is_contiguous():
        # AccumulateGrad gives a dense parameter's gradient the parameter's own strides.
        fresh = torch.empty_like(parameter, dtype=fresh.dtype).copy_(fresh)
    parameter.grad = fresh


def zeros_or(parameter: Parameter) -> Tensor:
    """The parameter's gradient, made of zeros if there is none yet."""
    grad = gradient(parameter)
    if grad is None:
        dtype = gradient_dtype(parameter) or parameter.dtype
        grad = parameter.grad = torch.zeros_like(parameter, dtype=dtype)
    return grad


def add(parameter: Parameter, fresh: Tensor) -> None:
    """gradient += fresh, of the parameter's shape."""
    grad = gradient(parameter)
    if grad is None:
        assign(parameter, fresh)
    else:
        grad.add_(fresh)


def _plainly(parameter: Parameter, operand: Tensor) -> Tensor | None:
    """`.grad`, where torch can add what it computes from operands of its dtype in place.

    This is what the general way below comes to, on any device: kernels of ours add to fp32 what is
    of 16 bits. Asked first, since nearly every W is such a one.
    """
    grad = parameter.grad
    if grad is None or grad.dtype != operand.dtype:
        return None
    if grad.layout != torch.strided or getattr(parameter, "main_grad", None) is not None:
        return None
    return grad


def add_sum(parameter: Parameter, dY: Tensor) -> None:
    """gradient += the column sums of dY (rows, n)."""
    if (grad := _plainly(parameter, dY)) is not None:
        grad.add_(dY.sum(0))
        return
    if (into := _for_kernel(parameter, dY)) is not None:
        _kernels().bias_grad_(into, _last_contiguous(dY))
        return
    add(parameter, dY.sum(0, dtype=sum_dtype(parameter, dY)))


def add_product(parameter: Parameter, left: Tensor, right: Tensor) -> None:
    """gradient += left @ right, in one kernel where the dtypes allow it."""
    if left.dtype == right.dtype and (grad := _plainly(parameter, left)) is not None:
        grad.addmm_(left, right)
        return
    if (into := _for_kernel(parameter, left)) is not None:
        _kernels().wgrad_(into, _last_contiguous(left.t()), _last_contiguous(right))
        return
    dtype = sum_dtype(parameter, left)
    left, right = left.to(dtype), right.to(dtype)
    grad = gradient(parameter)
    if grad is None:
        assign(parameter, left.mm(right))
    elif grad.dtype == dtype:
        grad.addmm_(left, right)
    else:
        grad.add_(left.mm(right))


def add_products(parameter: Parameter, pairs: Sequence[Pair]) -> None:
    """gradient += left @ right of each pair in order; in one launch where a kernel does that."""
    left = pairs[0][0]
    if _alike(pairs) and (into := _for_kernel(parameter, left)) is not None:
        _kernels().grouped_wgrad_(into, *_operands(pairs))
        return
    for pair in pairs:
        add_product(parameter, *pair)


def add_products_to(parameter: Parameter, view: View, pairs: Sequence[Pair]) -> None:
    """gradient[view] += left @ right of each pair in order, without touching the rest."""
    if len(pairs) > 1 and not _alike(pairs):
        for pair in pairs:
            add_products_to(parameter, view, [pair])
        return
    grad = zeros_or(parameter)
    alike = grad.stride() == parameter.stride()
    if alike and _kernel_adds(view.on(grad), pairs[0][0]):
        _kernels().grouped_wgrad_(view.on(grad), *_operands(pairs))
        return
    for left, right in pairs:
        dtype = sum_dtype(parameter, left)
        left, right = left.to(dtype), right.to(dtype)
        if not alike:
            # A gradient that a user laid out in another way: the view's numbers mean nothing there.
            whole = torch.zeros_like(parameter, dtype=dtype)
            view.on(whole).addmm_(left, right)
            grad.add_(whole)
        elif grad.dtype == dtype:
            view.on(grad).addmm_(left, right)
        else:
            view.on(grad).add_(left.mm(right))


def _alike(pairs: Sequence[Pair]) -> bool:
    """Whether one launch takes all operands: of one dtype, and as they lie.

    What a kernel takes as a copy only is copied one microbatch at a time, as in W's of their own:
    more than that no trial run has seen.
    """
    kinds = {tensor.dtype for pair in pairs for tensor in pair}
    return len(kinds) == 1 and all(a.stride(0) == 1 and b.stride(-1) == 1 for a, b in pairs)


def _operands(pairs: Sequence[Pair]) -> tuple[list[Tensor], list[Tensor]]:
    """dY and X of each pair, as dYᵀ X is what the kernel adds."""
    left = [_last_contiguous(left.t()) for left, _ in pairs]
    return left, [_last_contiguous(right) for _, right in pairs]


def add_stacked(part: Tensor, X: Tensor, dY: Tensor) -> bool:
    """part[e] += X[e]ᵀ dY[e], X (E, rows, in), dY (E, rows, out); False if no kernel does it."""
    if part.stride(-1) != 1:
        part, X, dY = part.mT, dY, X
    if not _kernel_adds(part, X):
        return False
    # As experts with one number of rows: one launch for all.
    offsets = torch.arange(1, len(X) + 1, dtype=torch.int32, device=X.device) * X.shape[1]
    left, right = _last_contiguous(X.flatten(0, 1)), _last_contiguous(dY.flatten(0, 1))
    _kernels().expert_wgrad_(part, left, right, offsets)
    return True


def add_rows(parameter: Parameter, indices: Tensor, dY: Tensor, padding_idx: int) -> bool:
    """gradient[i] += the rows of dY whose index is i; False where there is no kernel for it."""
    into = _for_kernel(parameter, dY)
    if into is None:
        return False
    _kernels().embedding_grad_(into, _last_contiguous(dY), indices.long(), padding_idx)
    return True


def add_experts(
    parameter: Parameter, view: View, left: Tensor, right: Tensor, offsets: Tensor
) -> bool:
    """gradient[e] += leftᵀ right over the rows of e; False where there is no kernel for it."""
    if View.of(parameter, parameter) != view:
        return False
    into = _for_kernel(parameter, left)
    if into is None:
        return False
    left, right = _last_contiguous(left), _last_contiguous(right)
    _kernels().expert_wgrad_(into, left, right, offsets.int())
    return True


def input_grad(dY: Tensor, w: Tensor) -> Tensor:
    """dX (rows, in) = dY (rows, out) @ w (out, in), by what the kernels' tables say on a GPU."""
    if _on_gpu(dY) and dY.dtype == w.dtype and dY.dtype in _LOW and 1 in w.stride():
        ops = _kernels()
        # In a backward with create_graph it is to be differentiated again.
        with nullcontext() if torch.is_grad_enabled() else ops.below_autograd():
            dX: Tensor = ops.dgrad(_last_contiguous(dY), w)
        return dX
    return dY.mm(w)


def norm_input_grad(
    dY: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor | None, offset: float
) -> Tensor | None:
    """dX (..., n) of a norm with scale offset + weight; None where no kernel makes it."""
    if torch.is_grad_enabled() or weight.dtype not in _FLOATS or not _norm_kernels(x, dY, rstd):
        return None
    operands, statistics = _norm_rows(dY, x), _norm_statistics(rstd, mean)
    dX: Tensor = _kernels().norm_dgrad(*operands, weight.contiguous(), *statistics, offset)
    return dX.view(x.shape)


def add_norm(
    weight: Parameter | None,
    bias: Parameter | None,
    dY: Tensor,
    x: Tensor,
    rstd: Tensor,
    mean: Tensor | None,
) -> bool:
    """A norm's dW += Σ dY x̂ and db += Σ dY over the rows; False where no kernel does it."""
    if weight is None or not _norm_kernels(x, dY, rstd):
        return False
    own = [weight] if bias is None else [weight, bias]
    if any(_wanted_dtype(p) != torch.float32 for p in own):
        return False
    # A row of zeros, as is made below where there is no gradient yet, is contiguous.
    if any((grad := gradient(p)) is not None and not grad.is_contiguous() for p in own):
        return False
    dW, db = zeros_or(weight), None if bias is None else zeros_or(bias)
    _kernels().norm_wgrad_(dW, db, *_norm_rows(dY, x), *_norm_statistics(rstd, mean))
    return True


def _norm_kernels(x: Tensor, dY: Tensor, rstd: Tensor) -> bool:
    """Also of fp32: torch has no operator for either half of a norm's backward."""
    alike = x.dtype == dY.dtype and x.dtype in _FLOATS and rstd.dtype == torch.float32
    return _on_gpu(x) and alike


def _norm_rows(dY: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return _last_contiguous(rows(dY)), _last_contiguous(rows(x))


def _norm_statistics(rstd: Tensor, mean: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return rstd.flatten(), None if mean is None else mean.flatten()


def _for_kernel(parameter: Parameter, operand: Tensor) -> Tensor | None:
    """The fp32 gradient that a kernel of ours adds 16-bit operands to; None if torch does it.

    torch has no operator for this: it would make the sum in 16 bits, or copies of the operands.
    Under autocast too, where autograd rounds each microbatch's part to 16 bits before it is added.
    """
    if not _on_gpu(operand) or operand.dtype not in _LOW:
        return None
    if _wanted_dtype(parameter) != torch.float32 or not parameter.is_contiguous():
        return None
    grad = zeros_or(parameter)
    return grad if grad.is_contiguous() else None


def _kernel_adds(part: Tensor, operand: Tensor) -> bool:
    """Whether our kernels add 16-bit operands to this part of a gradient; see `_for_kernel`."""
    adds = _on_gpu(operand) and operand.dtype in _LOW and part.dtype == torch.float32
    return adds and part.stride(-1) == 1


def left_to_kernels(weight: Parameter) -> tuple[bool, bool]:
    """Whether our kernels make (dX, dW) of this weight on a GPU, in a step and without autocast.

    A step sums `.grad` of 16-bit weights in fp32 (split.widen), unless their user chose a dtype.
    Else both are torch's own.
    """
    if weight.dtype not in _LOW:
        return False, False
    main: Tensor | None = getattr(weight, "main_grad", None)
    if main is not None:
        return True, main.dtype == torch.float32 and main.is_contiguous()
    chosen = getattr(weight, "grad_dtype", None)  # torch before 2.9 has none, and no wider .grad
    return True, chosen in (weight.dtype, torch.float32) and weight.is_contiguous()


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _kernels() -> Any:
    """zbpipe.kernels as torch operators; only GPUs need them imported."""
    from zbpipe.kernels import ops

    return ops


def _last_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
