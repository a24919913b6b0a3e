"""Which module has which rule, or the reason why it has none."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..graph import used_directly
from .conv import conv
from .deferred import Deferred
from .embedding import embedding
from .engine import PLAIN
from .linear import linear
from .norm import NAMES, form_of, norm
from .products import products


class Rule(NamedTuple):
    """How a module's forward runs while an entry is active.

    `own`: the module's own forward runs, and `call(module, entry, *args, **kwargs)` watches it.
    Else `call(module, entry, x)` takes its place, x being its one argument.
    `share`: of the parameters, what one token uses (experts: chosen ÷ all).
    """

    call: Callable[..., Any]
    own: bool = False
    share: float = 1.0


def rule_for(module: nn.Module, norms: bool = False) -> Rule | str:
    """The rule for this module's weight gradients, or the reason why it has none.

    A subclass has its parent's rule unless it overrides `forward`. A forward that is not known is
    tried on the meta device: where it uses its parameters in products only, these are deferred.
    `norms`: whether norms are deferred too.
    """
    cls = next(c for c in type(module).__mro__ if "forward" in c.__dict__)
    if cls is nn.Linear:
        return Rule(linear)
    if lies_transposed(module):
        return Rule(partial(linear, transposed=True))
    if isinstance(module, nn.Embedding):
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                return f"{option} is set"
        return Rule(embedding) if cls is nn.Embedding else _by_trial(module)
    if cls in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        if type(module)._conv_forward is not cls._conv_forward:  # type: ignore[attr-defined]
            return f"no rule for {type(module).__name__}: it overrides _conv_forward"
        return _conv_rule(module)
    if type(module).__name__.endswith(NAMES):
        return _norm_rule(module, norms)
    if any(p is not None and p.dim() == 3 for p in module._parameters.values()):
        return _experts_rule(module)
    return _by_trial(module)


def lies_transposed(module: nn.Module) -> bool:
    """Whether the module is transformers' Conv1D, whose weight lies (in, out)."""
    cls = next(c for c in type(module).__mro__ if "forward" in c.__dict__)
    # transformers is optional and slow to import, so its class is known by name.
    return (cls.__module__, cls.__qualname__) == ("transformers.pytorch_utils", "Conv1D")


def _conv_rule(module: Any) -> Rule | str:
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        return f"no rule for padding {module.padding!r}, {module.padding_mode}"
    return Rule(conv)


def _norm_rule(module: nn.Module, norms: bool) -> Rule | str:
    if not norms:
        return "a norm: in I by choice"
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1:
        return f"no rule for {type(module).__name__}: its weight is not one row"
    form = form_of(module)
    return form if isinstance(form, str) else Rule(partial(norm, form=form))


# What transformers (≥ 5) calls the ways to run experts whose products have a rule; None is eager.
_EXPERTS = (None, "eager", "grouped_mm")


def _experts_rule(module: Any) -> Rule | str:
    """Modules that `transformers.integrations.use_experts_implementation` decorates; else a trial.

    The decorated ones ask a router's choice of their forward, which cannot be tried.
    """
    marks = ("config", "num_experts", "has_gate", "has_bias", "is_transposed")
    if not all(hasattr(module, name) for name in marks):
        return _by_trial(module)
    how = getattr(module.config, "_experts_implementation", None)
    if how not in _EXPERTS:
        return f"no rule for experts_implementation={how!r}; 'eager' and 'grouped_mm' have one"
    chosen = getattr(module.config, "num_experts_per_tok", None)
    share = chosen / module.num_experts if isinstance(chosen, int) else 1.0
    return Rule(products, own=True, share=share)


# Whose forwards may be tried: those of libraries. A user's own is never run on made-up data.
TRIED = ("transformers", "peft")


def _by_trial(module: nn.Module) -> Rule | str:
    """The module's forward on some rows on the meta device: are all its parameters deferred?"""
    none = reason = f"no rule for {type(module).__name__}"
    weights = [p for p in module._parameters.values() if p is not None and p.dim() in (2, 3)]
    if not weights:
        return reason
    if type(module).__module__.partition(".")[0] not in TRIED:
        return f"{none}: a forward of its own is not tried on made-up data"
    for x in _trials(module, weights[0]):
        try:
            twin = _on_meta(module)
            with torch.enable_grad():
                outputs = list(_tensors(products(twin, Deferred(), x)))
        except Exception as error:
            reason = f"{none}: its forward on a test row raised {type(error).__name__}"
            continue
        own = {p for p in twin._parameters.values() if p is not None}
        wanted = [t for t in outputs if t.requires_grad]
        if wanted and not own & used_directly(wanted):
            return Rule(products, own=True)
        return f"{none}: its forward uses its parameters in another way than a product"
    return reason


def _trials(module: nn.Module, weight: Parameter) -> Iterator[Tensor]:
    """Inputs that the module may take: indices, rows, or rows of all experts, however they lie."""
    if isinstance(module, nn.Embedding):
        yield torch.zeros(1, 2, dtype=torch.int64, device="meta")
    elif weight.dim() == 2:
        yield torch.empty(1, 2, weight.shape[1], dtype=weight.dtype, device="meta")
    else:
        for width in weight.shape[:0:-1]:
            yield torch.empty(2 * len(weight), width, dtype=weight.dtype, device="meta")


def _on_meta(module: nn.Module) -> nn.Module:
    """A shallow copy whose own parameters and buffers are on the meta device."""
    twin = copy.copy(module)
    twin.__dict__["_parameters"] = {
        n: None if p is None else Parameter(torch.empty_like(p, device="meta"))
        for n, p in module._parameters.items()
    }
    twin.__dict__["_buffers"] = {
        n: None if b is None else b.to("meta") for n, b in module._buffers.items()
    }
    return twin


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


class Active:
    """The entry that a stage's modules defer to now."""

    __slots__ = ("entry",)

    def __init__(self) -> None:
        self.entry: Deferred | None = None


class SplitForward:
    """Stands in for `module.forward` while there is an entry.

    One for all microbatches: code that torch.compile made of a forward around this module's holds
    as long as it finds the same object here.
    """

    __slots__ = ("active", "module", "rule")

    def __init__(self, module: nn.Module, rule: Rule, active: Active) -> None:
        self.module, self.rule, self.active = module, rule, active

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, rule = self.module, self.rule
        if torch.compiler.is_compiling():
            # Compiled code cannot hand X and dY out: its weight gradients are autograd's, in I.
            return type(module).forward(module, *args, **kwargs)
        entry = self.active.entry
        if entry is None:
            # Someone kept this forward from F and calls it outside: its gradients are autograd's.
            return type(module).forward(module, *args, **kwargs)
        if not rule.own and (kwargs or len(args) != 1):
            plain = partial(type(module).forward, module)
            args, kwargs = inspect.signature(plain).bind(*args, **kwargs).args, {}
        if torch.is_grad_enabled() and self._may_split(args, kwargs):
            return rule.call(module, entry, *args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    def _may_split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        for parameter in self.module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                break
        else:
            return False
        if torch._C._are_functorch_transforms_active():
            return False
        if not self.rule.own:
            return type(args[0]) in PLAIN
        given = args if not kwargs else (*args, *kwargs.values())
        return all(type(x) in PLAIN for x in given if isinstance(x, Tensor))
