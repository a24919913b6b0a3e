"""What I leaves for W: the weight gradients of one (stage, microbatch), as records."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .engine import autocast_off

Accumulate = Callable[[Tensor, Tensor], None]


class Record(NamedTuple):
    """One weight gradient that is due: `accumulate(X, dY)` adds it to the parameters' `.grad`."""

    accumulate: Accumulate
    parameters: tuple[Parameter, ...]
    X: Tensor
    dY: Tensor  # noqa: N815 (the field's own letter)
    others: tuple[Tensor, ...] = ()  # what `accumulate` holds beside them, to be counted


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
        with torch.no_grad(), autocast_off(self._records[0].dY.device.type):
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
            for tensor in (record.X, record.dY, *record.others):
                storage = tensor.untyped_storage()
                seen.setdefault(storage._cdata, storage)
        return iter(seen.values())
