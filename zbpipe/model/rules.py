"""Weight-gradient rules: what I hands on, what it records, and what W later adds to `.grad`."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

Accumulate = Callable[[Tensor, Tensor], None]


class Record(NamedTuple):
    """One weight gradient that is due: `accumulate(X, dY)` adds it to the parameters' `.grad`."""

    accumulate: Accumulate
    parameters: tuple[Parameter, ...]
    X: Tensor
    dY: Tensor  # noqa: N815 (the field's own letter)


class Deferred:
    """The weight gradients of one (stage, microbatch): the entry that its F hands to its W.

    With `fused` (a B cell) each weight gradient is accumulated at once, inside the backward.
    Without, the backward (I) only records (rule, parameters, X, dY), and `run` (W) accumulates them
    in the order of the records: the same additions in the same order, so both give the same bits.

    Every parameter that gets a gradient through the entry is added to `touched`, if given: one set
    for all microbatches of a step tells whose post-accumulate-grad hooks are to fire. Records of
    `eager` parameters are accumulated inside the backward, fused or not: autograd adds to the same
    `.grad` (see graph.py), and the order of the additions must not depend on the schedule.
    """

    def __init__(
        self,
        fused: bool = False,
        touched: set[Parameter] | None = None,
        eager: Collection[Parameter] = (),
    ) -> None:
        self.fused = fused
        self.touched = touched
        self.eager = eager
        self._records: deque[Record] = deque()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Record) -> None:
        """Accumulate the record now (`fused`) or keep it for `run`."""
        if self.touched is not None:
            self.touched.update(record.parameters)
        if self.fused or (self.eager and any(p in self.eager for p in record.parameters)):
            record.accumulate(record.X, record.dY)
        else:
            self._records.append(record)

    def run(self) -> None:
        """W: accumulate every record in order, dropping its X and dY as soon as it is done."""
        if not self._records:
            return
        with torch.no_grad(), _autocast_off(self._records[0].dY.device.type):
            while self._records:
                record = self._records.popleft()
                record.accumulate(record.X, record.dY)
                del record  # before the next one allocates

    def parameters(self) -> Iterator[Parameter]:
        """The parameters that still wait for a weight gradient, each once."""
        seen = {id(p): p for record in self._records for p in record.parameters}
        return iter(seen.values())

    def storages(self) -> Iterator[torch.UntypedStorage]:
        """The distinct live storages held until `run`; `nbytes()` of each is in bytes."""
        seen: dict[int, torch.UntypedStorage] = {}
        for record in self._records:
            for tensor in (record.X, record.dY):
                storage = tensor.untyped_storage()
                seen.setdefault(storage._cdata, storage)
        return iter(seen.values())


def _gradient_dtype(parameter: Parameter) -> torch.dtype | None:
    """The dtype `.grad` must have; None means any (torch ≥ 2.9 lets users choose it)."""
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", parameter.dtype)
    return dtype


def _assign(parameter: Parameter, fresh: Tensor) -> None:
    """Make `fresh`, which nobody else holds, the `.grad`, laid out as autograd would."""
    fresh = fresh.to(_gradient_dtype(parameter) or fresh.dtype)
    if not parameter.is_contiguous():
        # AccumulateGrad gives a dense parameter's gradient the parameter's own strides.
        fresh = torch.empty_like(parameter, dtype=fresh.dtype).copy_(fresh)
    parameter.grad = fresh


def _add(parameter: Parameter, fresh: Tensor) -> None:
    if parameter.grad is None:
        _assign(parameter, fresh)
    else:
        _replace_if_sparse(parameter).add_(fresh)


def _add_product(parameter: Parameter, left: Tensor, right: Tensor) -> None:
    """`parameter.grad += left @ right`, in one kernel where the dtypes allow it."""
    if parameter.grad is None:
        _assign(parameter, left.mm(right))
        return
    grad = _replace_if_sparse(parameter)
    if grad.dtype == left.dtype:
        grad.addmm_(left, right)
    else:
        grad.add_(left.mm(right))


def _replace_if_sparse(parameter: Parameter) -> Tensor:
    """The existing `.grad`; a sparse one (a functional sparse embedding made it) becomes dense."""
    grad = parameter.grad
    assert grad is not None
    if grad.layout != torch.strided:
        grad = parameter.grad = grad.to_dense()
    return grad


def _rows(tensor: Tensor) -> Tensor:
    """(..., n) as (rows, n): a view where the strides allow one."""
    if tensor.dim() == 2:
        return tensor
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.flatten(0, -2)


def _linear_weights(
    weight: Parameter | None, bias: Parameter | None, transposed: bool, X: Tensor, dY: Tensor
) -> None:
    """dW += dYᵀX, (out, in), or XᵀdY, (in, out), when `transposed`; db += the column sums of dY."""
    if weight is not None:
        X = _rows(X)
        if transposed:
            _add_product(weight, X.t(), dY)
        else:
            _add_product(weight, dY.t(), X)
    if bias is not None:
        _add(bias, dY.sum(0))


def _embedding_weights(weight: Parameter, padding_idx: int, indices: Tensor, dY: Tensor) -> None:
    """dW[i] += the rows of dY whose index is i, except for `padding_idx` (-1: none)."""
    if weight.device.type != "cpu":
        # index_add_ is not deterministic on CUDA; the dense form is.
        _add(weight, _embedding_backward(dY, indices, weight.shape[0], padding_idx))
        return
    # On CPU the dense form costs a pass over the whole table for each microbatch: 68 ms against
    # 0.19 ms for 1024 tokens in a table of 50257 × 768 (fp32, one thread).
    if weight.grad is None:
        _assign(weight, torch.zeros_like(weight, memory_format=torch.contiguous_format))
    if padding_idx >= 0:
        kept = indices != padding_idx
        indices, dY = indices[kept], dY[kept]
    grad = _replace_if_sparse(weight)
    grad.index_add_(0, indices, dY.to(grad.dtype))


def _embedding_backward(dY: Tensor, indices: Tensor, rows: int, padding_idx: int) -> Tensor:
    dense: Tensor = torch.ops.aten.embedding_dense_backward.default(
        dY, indices, rows, padding_idx, False
    )
    return dense


def _autocast_off(device: str) -> Any:
    """A context without autocast: I and W compute in F's dtypes, wherever they are called from."""
    if autocast_dtype(device) is None:
        return _AS_IT_IS
    return torch.autocast(device, enabled=False)


_AS_IT_IS = nullcontext()


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype that autocast casts to on this device type now, None if it is off."""
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """As autocast casts an operand of a matrix product: floating point, but never fp64."""
    if dtype is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def _due(ctx: Any, first: int, last: int) -> list[bool] | None:
    """Which of the inputs first..last-1 this backward wants a `.grad` for.

    None: this is no accumulation (`autograd.grad`, or a backward with create_graph, as for a
    gradient penalty inside F), so the gradients go through autograd and nothing is recorded.
    """
    if torch.is_grad_enabled():
        return None
    nodes, needed = ctx.next_functions, ctx.needs_input_grad
    try:
        return [
            needed[i] and torch._C._will_engine_execute_node(nodes[i][0])
            for i in range(first, last)
        ]
    except RuntimeError:
        # The one thing the engine refuses here: a leaf's node under autograd.grad().
        return None


class _Linear(torch.autograd.Function):
    """y (..., out) = x Wᵀ + b, W (out, in), or x W + b, W (in, out), `transposed`; x (..., in)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Parameter,
        bias: Parameter | None,
        entry: Deferred,
        transposed: bool,
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.entry, ctx.transposed, ctx.dtype = entry, transposed, dtype
        # Unpacked tensors may be copies (saved_tensors_hooks); .grad belongs to these two.
        ctx.weight, ctx.bias = weight, bias
        ctx.shape = x.shape
        needed = ctx.needs_input_grad
        ctx.save_for_backward(x if needed[1] else None, weight if needed[0] else None)
        w, b = _cast(weight, dtype), None if bias is None else _cast(bias, dtype)
        if not transposed:
            y = F.linear(x, w, b)
        else:
            y = _rows(x).mm(w) if b is None else torch.addmm(b, _rows(x), w)
            y = y.view(*x.shape[:-1], y.shape[1])
        # Autograd refuses in-place operations on a view that a Function returns. `data` is none;
        # a view made outside would be one more node to run in every backward.
        return y.data

    @staticmethod
    def backward(ctx: Any, dY: Tensor | None) -> tuple[Tensor | None, ...]:
        if dY is None:
            return (None,) * 6
        with _autocast_off(dY.device.type):
            return _linear_backward(ctx, _rows(dY))


def _linear_backward(ctx: Any, dY: Tensor) -> tuple[Tensor | None, ...]:
    """Of `_Linear`: dX now, the weights' part into the entry; dY (rows, out)."""
    X, weight = ctx.saved_tensors
    dX = None
    if weight is not None:
        w = _cast(weight, ctx.dtype)
        dX = dY.mm(w.t() if ctx.transposed else w).view(ctx.shape)
    due = _due(ctx, 1, 2 if ctx.bias is None else 3)
    if due is None:
        return dX, *_linear_by_autograd(ctx, X, dY), None, None, None
    weight = ctx.weight if due[0] else None
    bias = ctx.bias if due[-1] and len(due) == 2 else None
    parameters = tuple([p for p in (weight, bias) if p is not None])
    if parameters:
        # Detached, or the entry would hold the graph that holds the entry. A bias alone needs no X.
        X = dY if X is None or weight is None else X.detach()
        rule = partial(_linear_weights, weight, bias, ctx.transposed)
        ctx.entry.add(Record(rule, parameters, X, dY))
    return dX, None, None, None, None, None


def _linear_by_autograd(ctx: Any, X: Tensor | None, dY: Tensor) -> tuple[Tensor | None, ...]:
    dW = db = None
    if ctx.needs_input_grad[1]:
        assert X is not None
        dW = _rows(X).t().mm(dY) if ctx.transposed else dY.t().mm(_rows(X))
        dW = dW.to(ctx.weight.dtype)
    if ctx.needs_input_grad[2]:
        db = dY.sum(0).to(ctx.bias.dtype)
    return dW, db


class _Embedding(torch.autograd.Function):
    """y = W[indices]: indices (n,), W (rows, width), y (n, width)."""

    @staticmethod
    def forward(
        ctx: Any, indices: Tensor, weight: Parameter, entry: Deferred, padding_idx: int
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.entry, ctx.weight, ctx.padding_idx = entry, weight, padding_idx
        ctx.save_for_backward(indices)
        return F.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, dY: Tensor | None) -> tuple[Tensor | None, ...]:
        if dY is None:
            return (None,) * 4
        (indices,) = ctx.saved_tensors
        weight, padding_idx = ctx.weight, ctx.padding_idx
        due = _due(ctx, 1, 2)
        if due is None:
            dense = _embedding_backward(dY, indices, weight.shape[0], padding_idx)
            return None, dense, None, None
        if due[0]:
            rule = partial(_embedding_weights, weight, padding_idx)
            ctx.entry.add(Record(rule, (weight,), indices.detach(), dY))
        return None, None, None, None


def _linear(module: Any, x: Tensor, entry: Deferred, transposed: bool) -> Tensor:
    dtype = autocast_dtype(x.device.type)
    y: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        _cast(x, dtype), module.weight, module.bias, entry, transposed, dtype
    )
    return y


def _embedding(module: Any, x: Tensor, entry: Deferred) -> Tensor:
    padding_idx = -1 if module.padding_idx is None else module.padding_idx
    y: Tensor = _Embedding.apply(  # type: ignore[no-untyped-call]
        x.flatten(), module.weight, entry, padding_idx
    )
    return y.view(*x.shape, y.shape[1])


SPLIT_FUNCTIONS = (_Linear, _Embedding)


Rule = Callable[[Any, Tensor, Deferred], Tensor]


def rule_for(module: nn.Module) -> Rule | str:
    """The rule for this module's weight gradients, or the reason why it has none.

    A subclass has its parent's rule unless it overrides `forward`.
    """
    cls = next(c for c in type(module).__mro__ if "forward" in c.__dict__)
    if cls is nn.Linear:
        return partial(_linear, transposed=False)
    # transformers is optional and slow to import, so its class is known by name.
    if (cls.__module__, cls.__qualname__) == ("transformers.pytorch_utils", "Conv1D"):
        return partial(_linear, transposed=True)
    if isinstance(module, nn.Embedding) and cls is nn.Embedding:
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                return f"{option} is set"
        return _embedding
    return f"no rule for {type(module).__name__}"


class SplitForward:
    """Stands in for `module.forward` while the entry is active."""

    __slots__ = ("entry", "module", "rule")

    def __init__(self, module: nn.Module, rule: Rule, entry: Deferred) -> None:
        self.module, self.rule, self.entry = module, rule, entry

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if kwargs or len(args) != 1:
            plain = partial(type(module).forward, module)
            args = inspect.signature(plain).bind(*args, **kwargs).args
        (x,) = args
        if torch.is_grad_enabled() and _is_ordinary(x):
            for parameter in module._parameters.values():
                if parameter is not None and parameter.requires_grad:
                    return self.rule(module, x, self.entry)
        return type(module).forward(module, x)


def _is_ordinary(x: Any) -> bool:
    """Whether a Function of ours may take x: no tensor subclass, no functorch, no tracing."""
    return (
        type(x) in (Tensor, Parameter)
        and not torch._C._are_functorch_transforms_active()
        and not torch.compiler.is_compiling()
    )
