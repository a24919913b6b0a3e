"""What I leaves for W: the weight gradients of one (stage, microbatch), as records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .engine import autocast_off

Accumulate = Callable[[Tensor, Tensor], None]


class Groupable(ABC):
    """An `Accumulate` that can add several microbatches at once.

    Those with equal `key` add to the same thing in the same way. `several` gives the bits of one
    call after the other.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """What it adds to, and how."""

    @abstractmethod
    def __call__(self, X: Tensor, dY: Tensor) -> None:
        """Add one (X, dY)."""

    @abstractmethod
    def several(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add each (X, dY) in order."""


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


def run_together(entries: Sequence[Deferred]) -> None:
    """W of several microbatches in order: what can be grouped is added to each weight at once.

    Every parameter gets the additions that `run` of one entry after the other would make, in that
    order, hence the same bits; only the order among parameters is another one.
    """
    if len(entries) == 1:
        entries[0].run()
        return
    records = [record for entry in entries for record in entry._records]
    for entry in entries:
        entry._records.clear()
    if not records:
        return
    with torch.no_grad(), autocast_off(records[0].dY.device.type):
        waiting = deque(_apart(records))
        del records
        while waiting:
            _accumulate(waiting.popleft())  # whose X and dY are let go of before the next


def _accumulate(records: Iterable[Record]) -> None:
    for key, alike in groupby(records, _key):
        first, *others = alike
        if key is None or not others:
            for record in (first, *others):
                record.accumulate(record.X, record.dY)
        else:
            assert isinstance(first.accumulate, Groupable)
            first.accumulate.several([(record.X, record.dY) for record in (first, *others)])


def _key(record: Record) -> Hashable:
    return record.accumulate.key if isinstance(record.accumulate, Groupable) else None


def _apart(records: Iterable[Record]) -> Iterator[list[Record]]:
    """The records in groups that share no parameter, in their order within each.

    A record that names no parameter is a group by itself.
    """
    home: dict[int, dict[int, Record]] = {}  # id(parameter) → its group, by place
    for place, record in enumerate(records):
        if not record.parameters:
            home[-1 - place] = {place: record}  # no id is negative
            continue
        found = {id(g): g for p in record.parameters if (g := home.get(id(p))) is not None}
        group: dict[int, Record] = {}
        for other in found.values():
            group.update(other)
        group = next(iter(found.values())) if len(found) == 1 else group
        group[place] = record
        for member in group.values() if len(found) > 1 else (record,):
            home.update((id(p), group) for p in member.parameters)
    for group in {id(g): g for g in home.values()}.values():
        yield [group[place] for place in sorted(group)]
