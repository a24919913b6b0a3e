"""A look at autograd's graph: which parameters a forward uses beside their modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from .rules import SPLIT_FUNCTIONS


def used_directly(outputs: Iterable[Tensor]) -> set[Parameter]:
    """Parameters that the graph of `outputs` reaches otherwise than through a split module.

    For instance `F.linear(x, self.embedding.weight)` in a forward: autograd makes that gradient.
    """
    found: set[Parameter] = set()
    pending = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(pending)
    while pending:
        node: Any = pending.pop()
        split = getattr(node, "_forward_cls", None) in SPLIT_FUNCTIONS
        for following, _ in node.next_functions:
            if following is None:
                continue
            variable = getattr(following, "variable", None)
            if variable is None:
                if following not in seen:
                    seen.add(following)
                    pending.append(following)
            elif not split:
                found.add(variable)
    return found
