"""The I/W split of a stage: which modules defer their weight gradients, and when they do."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import Parameter

from zbpipe.errors import ZbpipeError
from zbpipe.model.hooks import fire_hooks, mute_hooks
from zbpipe.model.rules import Deferred
from zbpipe.model.rules.choose import Active, Rule, SplitForward, rule_for

__all__ = [
    "Deferred",
    "SplitReport",
    "Splitter",
    "fire_hooks",
    "mute_hooks",
    "narrow",
    "wide_gradients",
    "widen",
]


# A module with its class and the names, shapes and dtypes of its parameters.
_Kind = tuple[nn.Module, type[nn.Module], tuple[tuple[str, tuple[int, ...], torch.dtype], ...]]


class _Site(NamedTuple):
    """A module that owns parameters, with its rule, or the reason why it has none."""

    name: str
    module: nn.Module
    parameters: dict[str, Parameter]
    rule: Rule | None
    reason: str

    @property
    def share(self) -> float:
        """What part of the parameters a token uses."""
        return self.rule.share if self.rule else 1.0


@dataclass(frozen=True)
class SplitReport:
    """What of a stage's weight gradients is deferred to W.

    FLOPs are a proxy: 2 per trainable parameter and token for each module that uses it, of experts
    those that a token is sent to; none for embeddings, whose weight gradient is a scatter.

    Attributes:
        deferred_flops: proxy FLOPs a token of the weight gradients that W computes.
        total_flops: the same over all weight gradients.
        not_split: (qualified module name, reason) of each trainable module that stays in I.
    """

    deferred_flops: float
    total_flops: float
    not_split: tuple[tuple[str, str], ...]

    @property
    def deferred_share(self) -> float:
        """`deferred_flops / total_flops`; 0 where nothing is trainable."""
        return self.deferred_flops / self.total_flops if self.total_flops else 0.0


class Splitter:
    """Splits the backward of one stage into I and W, without changing the stage.

    A parameter is deferred wholly or not at all: if one of the modules that use it has no rule, or
    if the parameter is in `excluded` or carries gradient hooks (`register_hook`), every module that
    uses it is left to autograd. What is not deferred gets its weight gradient in I: correct, only
    not movable. A gradient that autograd itself makes for a deferred parameter (say by
    `F.linear(x, self.fc.weight)`) is added to the same `.grad`.

    Linear, Conv1D, embeddings and convolutions have rules of their own. A module whose forward is
    not known is watched while it runs, if all it does with its parameters are products, lookups and
    added biases: subclasses of these, routers, and transformers' experts ("eager" and "grouped_mm";
    each expert adds to its own slice of the gradient). Norms stay in I unless `norms` is set: to
    hold x and dY for them costs a quarter more stash and makes I no shorter (rules/norm.py). What a
    frozen parameter would get is never made or held.

    What torch.compile made, of a module or around it, runs as it is and stays in I: compiled code
    cannot hand x and dY out.

    W adds to `.main_grad` where a parameter has one, else to `.grad`; see `wide_gradients` for
    low-precision weights.

    Example, one microbatch:

        entry = Deferred(fused=False)
        with splitter.active(entry):
            y = stage(x)                            # F
        with splitter.active(entry):                # checkpointed layers re-run their forward here
            torch.autograd.backward(y, dY)          # I (B with fused=True)
        entry.run()                                 # W
    """

    def __init__(
        self, stage: nn.Module, excluded: Collection[Parameter] = (), norms: bool = False
    ) -> None:
        self._stage = stage
        self._norms = norms
        self._rules: dict[_Kind, Rule | str] = {}
        self._excluded = {id(p): p for p in excluded}
        self._now = Active()
        self._stand_ins: list[SplitForward] = []
        self._decide()

    @contextmanager
    def active(self, entry: Deferred) -> Iterator[None]:
        """Let the stage's forward, and the backward through it, defer to `entry`.

        Wrap both F and I in it. I must be `torch.autograd.backward` or `.backward()`: what
        `torch.autograd.grad` or `inputs=` does not ask for gets no gradient, here as ever.
        Raises ZbpipeError if the splitter is already active: one stage runs one microbatch at a
        time.
        """
        if self._now.entry is not None:
            raise ZbpipeError(
                "Splitter.active() entered twice: leave the context of one microbatch before the "
                "next one starts, or its weight gradients would go to the wrong entry"
            )
        if self._is_stale():
            self._decide()
        stand_ins = self._stand_ins
        self._now.entry = entry
        try:
            for stand_in in stand_ins:
                stand_in.module.__dict__["forward"] = stand_in
            yield
        finally:
            for stand_in in stand_ins:
                if stand_in.module.__dict__.get("forward") is stand_in:
                    del stand_in.module.__dict__["forward"]
            self._now.entry = None

    def report(self, eager: Collection[Parameter] = ()) -> SplitReport:
        """What is deferred now and what is not, and why.

        `eager`: parameters that autograd was found to accumulate into, too (graph.used_directly),
        as where a product with them is written out, or runs in code that torch.compile made.
        """
        if self._now.entry is None and self._is_stale():
            self._decide()
        deferred = total = 0.0
        left = []
        for site in self._sites:
            trainable = [p for p in site.parameters.values() if p.requires_grad]
            flops = 0.0 if isinstance(site.module, nn.Embedding) else _flops(trainable)
            flops *= site.share
            total += flops
            reason = self._reasons.get(id(site.module))
            if reason is None and (name := _first_of(site, eager)):
                reason = f"{name} is also used outside of the module's own forward, or compiled"
            if reason is None:
                deferred += flops
            elif trainable:
                left.append((site.name, reason))
        return SplitReport(deferred, total, tuple(left))

    def products(self) -> list[Parameter]:
        """The weights (two dimensions) whose gradients W makes as products."""
        return [
            p
            for site in self._split
            if not isinstance(site.module, nn.Embedding)
            for p in site.parameters.values()
            if p.dim() == 2 and p.requires_grad
        ]

    def _decide(self) -> None:
        self._sites = self._survey()
        own = {id(s.module): reason for s in self._sites if (reason := self._own_reason(s))}
        self._reasons = _close_over_shared(self._sites, own)
        self._split = [s for s in self._sites if id(s.module) not in self._reasons]
        # Kept where nothing changed, since compiled code around them asks for the very object.
        known = {(id(f.module), f.rule): f for f in self._stand_ins}
        self._stand_ins = [
            known.get((id(s.module), s.rule)) or SplitForward(s.module, s.rule, self._now)
            for s in self._split
            if s.rule
        ]
        # A site with a rule is kept out by something that may go away again: a hook, a patch.
        self._may_grow = any(
            "forward" in s.module.__dict__ or any(p._backward_hooks for p in s.parameters.values())
            for s in self._sites
            if s.rule
        )

    def _survey(self) -> list[_Site]:
        """Every module of the stage that owns parameters, in the order of `named_modules`."""
        opaque: dict[int, str] = {}
        sites = []
        for name, module in self._stage.named_modules():
            inherited = opaque.get(id(module)) or _opaque(module)
            if inherited:
                opaque.update((id(child), inherited) for child in module.modules())
            parameters = {n: p for n, p in module._parameters.items() if p is not None}
            if parameters:
                found = inherited or _unfit(parameters) or self._rule_for(module, parameters)
                rule, reason = (None, found) if isinstance(found, str) else (found, "")
                sites.append(_Site(name or type(module).__name__, module, parameters, rule, reason))
        return sites

    def _rule_for(self, module: nn.Module, parameters: dict[str, Parameter]) -> Rule | str:
        """As `rule_for`, which may have to try the module's forward: once is enough."""
        shapes = tuple((n, tuple(p.shape), p.dtype) for n, p in parameters.items())
        kind = (module, type(module), shapes)
        if kind not in self._rules:
            self._rules[kind] = rule_for(module, self._norms)
        return self._rules[kind]

    def _is_stale(self) -> bool:
        """Whether hooks, patches or replaced parameters came or went since `_decide`."""
        if self._may_grow:
            return True
        for site in self._split:
            if "forward" in site.module.__dict__:
                return True
            own = site.module._parameters
            for name, parameter in site.parameters.items():
                if own.get(name) is not parameter or parameter._backward_hooks:
                    return True
        return False

    def _own_reason(self, site: _Site) -> str:
        if site.rule is None:
            return site.reason
        if "forward" in site.module.__dict__:
            return "its forward was replaced on the instance"
        for name, parameter in site.parameters.items():
            if parameter._backward_hooks:
                return f"{name} has gradient hooks"
            if id(parameter) in self._excluded:
                return f"{name} is excluded"
        return ""


def _close_over_shared(sites: list[_Site], own: dict[int, str]) -> dict[int, str]:
    """id(module) → why it is not split: its own reason, or one of a module it shares with."""
    reasons = dict(own)
    blocked: dict[int, str] = {}  # id(parameter) → the module that keeps it in I
    pending = sites
    while pending:
        ready = [s for s in pending if id(s.module) in reasons]
        if not ready:
            break
        for site in ready:
            for parameter in site.parameters.values():
                blocked.setdefault(id(parameter), site.name)
        pending = [s for s in pending if id(s.module) not in reasons]
        for site in pending:
            for parameter in site.parameters.values():
                if id(parameter) in blocked:
                    reasons[id(site.module)] = f"shares a parameter with {blocked[id(parameter)]}"
    return reasons


def _opaque(module: nn.Module) -> str:
    """Why the modules inside this one do not run by their own `forward`, "" if they do."""
    if isinstance(module, nn.MultiheadAttention):
        return "MultiheadAttention reads its parameters itself"
    if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
        return "compiled by torch.compile"
    if any(_is_compiled(held) for held in (module.forward, *vars(module).values())):
        return "its forward is compiled by torch.compile"
    return ""


def _is_compiled(held: Any) -> bool:
    """Whether it is what torch.compile made of a method, which may run modules inside this one."""
    plain = getattr(held, "_torchdynamo_orig_callable", None)
    return plain is not None and (inspect.ismethod(held) or inspect.ismethod(plain))


def _first_of(site: _Site, parameters: Collection[Parameter]) -> str:
    """The name of the first parameter of the site that is among these, "" if none is."""
    own = site.parameters.items()
    return next((n for n, p in own if p.requires_grad and p in parameters), "")


def _unfit(parameters: dict[str, Parameter]) -> str:
    """Why these parameters fit no rule, "" if they do."""
    for name, parameter in parameters.items():
        if type(parameter) is not Parameter:
            return f"{name} is a {type(parameter).__name__}"
        if not parameter.is_floating_point():
            return f"{name} is {parameter.dtype}"
    if any(p.dim() == 3 for p in parameters.values()):
        return ""  # experts have names of their own
    if "weight" not in parameters:
        return "weight is not a parameter of its own (parametrized, or computed)"
    for name in parameters:
        if name not in ("weight", "bias"):
            return f"{name} is a parameter no rule knows"
    return ""


def _flops(parameters: Iterable[Parameter]) -> float:
    return 2.0 * sum(p.numel() for p in parameters)


@contextmanager
def wide_gradients(
    parameters: Iterable[Parameter], dtype: torch.dtype = torch.float32
) -> Iterator[None]:
    """Sum the gradients of low-precision parameters in `dtype` inside; used around a whole step.

    Inside, `.grad` of each parameter with fewer bits has this dtype: W adds products that were
    summed in it, and autograd what it makes itself in I. On leaving, `.grad` is rounded to the
    parameter's dtype, once a step instead of once a microbatch. That is the form that torch's
    optimizers take: AdamW refuses a gradient of another dtype than its parameter's.

    Whoever keeps fp32 gradients of their own (a fp32 master copy of the weights) gives parameters a
    `.main_grad` tensor instead: W adds to it and leaves `.grad` None. What autograd makes itself,
    for parameters that are not split, goes to `.grad` even then.

    Raises ZbpipeError where torch cannot give a gradient another dtype (before torch 2.9).
    """
    if not hasattr(Parameter, "grad_dtype"):
        raise ZbpipeError(
            f"wide_gradients needs Tensor.grad_dtype, which torch {torch.__version__} lacks: "
            "install torch ≥ 2.9, or give the parameters a .main_grad of fp32 zeros"
        )
    wide = widen(parameters, dtype)
    try:
        yield
    finally:
        narrow(wide)


def widen(parameters: Iterable[Parameter], dtype: torch.dtype = torch.float32) -> list[Parameter]:
    """Let `.grad` of low-precision parameters be of `dtype`; which they are, to `narrow` again.

    A parameter whose user chose a `grad_dtype` keeps it. None where torch (before 2.9) has no such
    thing: gradients are summed in the parameters' own precision then.
    """
    if not hasattr(Parameter, "grad_dtype"):
        return []
    wide = [
        p
        for p in parameters
        if p.is_floating_point()
        and p.dtype.itemsize < dtype.itemsize
        and p.requires_grad
        and p.grad_dtype == p.dtype
    ]
    for parameter in wide:
        _set_grad_dtype(parameter, dtype)
    return wide


def narrow(wide: Iterable[Parameter]) -> None:
    """Round the gradients that `widen` made wide to their parameters' dtype."""
    for parameter in wide:
        _set_grad_dtype(parameter, parameter.dtype)


def _set_grad_dtype(parameter: Parameter, dtype: torch.dtype) -> None:
    grad, parameter.grad = parameter.grad, None
    parameter.grad_dtype = dtype
    parameter.grad = None if grad is None else grad.to(dtype)
