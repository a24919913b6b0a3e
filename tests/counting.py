"""W and I through zbpipe.kernels on the CPU, as on a GPU, and how often each operator is called."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from zbpipe.kernels import ops
from zbpipe.model.rules import accumulate


def kernels_counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """From now on every tensor counts as a GPU's; on the CPU the operators run on torch."""
    calls: Counter[str] = Counter()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            if name != "below_autograd":  # a context, no operator
                calls[name] += 1
            return getattr(ops, name)

    monkeypatch.setattr(accumulate, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(accumulate, "_kernels", Counting)
    return calls
