"""Post-accumulate-grad hooks: kept from firing in each I and B, called once a gradient is whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch.nn import Parameter


@contextmanager
def mute_hooks(
    parameters: Iterable[Parameter], touched: set[Parameter] | None = None
) -> Iterator[None]:
    """Keep post-accumulate-grad hooks from firing inside; used around each I and B.

    Autograd would call them once a microbatch, before W has run. `fire_hooks` calls them when the
    gradient is complete. Parameters with such hooks that autograd accumulates into meanwhile are
    added to `touched`. Hooks that are registered inside are not muted; they stay registered.
    """
    muted = []
    try:
        for parameter in parameters:
            hooks = parameter._post_accumulate_grad_hooks
            if hooks and _RECORDER not in hooks:
                muted.append((hooks, dict(hooks)))
                hooks.clear()  # in place: autograd holds this dict
                hooks[_RECORDER] = _ignore if touched is None else touched.add
        yield
    finally:
        for hooks, saved in muted:
            del hooks[_RECORDER]
            added = dict(hooks)
            hooks.clear()
            hooks.update(saved)
            hooks.update(added)


_RECORDER = -1  # torch numbers its hooks from 0


def _ignore(parameter: Parameter) -> None:
    """Stands in for the muted hooks where nobody asks which parameters were touched."""


def fire_hooks(parameters: Iterable[Parameter]) -> None:
    """Call the post-accumulate-grad hooks of each parameter that has a `.grad`, in order.

    To be called once a step, after the parameters' last W. Where gradients of an earlier step may
    still lie in `.grad`, pass only the parameters `touched` in this one (`Deferred`, `mute_hooks`).
    A parameter with a `.main_grad` counts as having a gradient.
    """
    for parameter in parameters:
        if parameter.grad is not None or getattr(parameter, "main_grad", None) is not None:
            for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                hook(parameter)
