"""Parameters that the first and the last stage share: their gradients are summed once a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..model.split import fire_hooks
from .world import World


class Tied:
    """Sums the step's gradients of tied parameters over the two ranks that hold a copy each.

    In one process there is one parameter and autograd has summed already; between processes the
    first and the last rank exchange what this step added, so that gradients of earlier steps are
    not counted twice. Post-accumulate-grad hooks fire after the sum.
    """

    def __init__(self, world: World, parameters: Sequence[nn.Parameter], ranks: tuple[int, int]):
        self.parameters = [p for p in parameters if p.requires_grad]
        self._world = world
        self._ranks = ranks
        self._apart = ranks[0] != ranks[1] and world.group is not None and world.rank in ranks
        self._before: list[torch.Tensor | None] = []

    @property
    def counted_elsewhere(self) -> bool:
        """Whether the first rank, and not this one, counts the gradients in a norm."""
        return self._apart and self._world.rank == self._ranks[1]

    def begin(self) -> None:
        """Set the gradients of earlier steps aside."""
        self._before = [parameter.grad for parameter in self.parameters]
        if self._apart:
            for parameter in self.parameters:
                parameter.grad = None

    def end(self) -> None:
        """Sum, put the earlier gradients back on top, and fire the hooks."""
        if self._apart:
            for parameter, before in zip(self.parameters, self._before, strict=True):
                total = self._exchange(parameter)
                if total is not None and before is not None:
                    total = before.add_(total)
                parameter.grad = before if total is None else total
        self._before = []
        with torch.no_grad():
            fire_hooks(self.parameters)

    def _exchange(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The sum of both ranks' gradients, first + last on either: the same bits."""
        mine = parameter.grad
        theirs = torch.zeros_like(parameter)
        there = torch.zeros((), dtype=torch.int64)
        here = torch.tensor(int(mine is not None))
        first, last = self._ranks
        peer = last if self._world.rank == first else first
        sends = [
            dist.isend(here, peer, self._world.group),
            dist.isend(theirs if mine is None else mine.contiguous(), peer, self._world.group),
        ]
        received = torch.empty_like(theirs, memory_format=torch.contiguous_format)
        dist.recv(there, peer, self._world.group)
        dist.recv(received, peer, self._world.group)
        for send in sends:
            if send is not None:
                send.wait()
        if not int(there):
            return mine
        if mine is None:
            return received
        return mine + received if self._world.rank == first else received + mine
