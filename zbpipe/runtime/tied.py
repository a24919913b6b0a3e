"""Parameters that the first and the last stage share: both ends' gradients of a step, summed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..model.hooks import fire_hooks
from ..model.rules.accumulate import add


def add_sums(
    parameters: Iterable[nn.Parameter],
    first: Iterable[torch.Tensor | None],
    last: Iterable[torch.Tensor | None],
) -> None:
    """Add what both ends have for each parameter to its `.grad` or `.main_grad`; fire its hooks.

    First + last, in this order wherever it is computed: the same bits on both ranks. None where a
    stage had no gradient.
    """
    with torch.no_grad():
        changed = []
        for parameter, a, b in zip(parameters, first, last, strict=True):
            if a is not None and b is not None:
                total = a + b
            elif (one := b if a is None else a) is not None:
                total = one.clone()  # it may lie in a slot
            else:
                continue
            add(parameter, total)
            changed.append(parameter)
        fire_hooks(changed)
