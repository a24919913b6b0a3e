"""V shapes: two chunks a rank, stage s < p on rank s, else on rank 2p - 1 - s."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

from ..errors import ScheduleError
from .core import Action, Schedule

# Chunks a microbatch takes a cell each of F, I and W on: the period of a repeated building block.
_PERIOD = 6


def v_placement(ranks: int) -> tuple[int, ...]:
    """Down over all ranks and up again: the turn is inside the last rank."""
    return tuple(stage if stage < ranks else 2 * ranks - 1 - stage for stage in range(2 * ranks))


class TwoChunks:
    """The actions of a rank with two chunks; `do` appends those that can be.

    Counts microbatches of each chunk, so that F, I and W stay ascending. `microbatches[chunk]` are
    those that run through the chunk, from `first[chunk]` on.
    """

    def __init__(
        self,
        stages: tuple[int, int],
        microbatches: tuple[int, int],
        first: tuple[int, int] = (0, 0),
    ) -> None:
        self._stages, self._microbatches, self._first = stages, microbatches, first
        self._done = {kind + chunk: 0 for kind in "FIW" for chunk in "01"}
        self.actions: list[Action] = []

    def left(self, cell: str) -> int:
        """How many of a cell such as "F0" (kind, chunk) are still to come."""
        return self._microbatches[int(cell[1])] - self._done[cell]

    def do(self, *cells: str) -> None:
        """Append the next microbatch of each cell, such as "F0" or "B1".

        Left out is what has nothing left or what it needs is not there: F for I, I for W. A B
        whose W would overtake another is an I.
        """
        for cell in cells:
            kind, chunk = cell[0], cell[1]
            count = self._done["I" + chunk if kind == "B" else cell]
            needs = {"F": self._microbatches[int(chunk)], "W": self._done["I" + chunk]}
            if count >= min(needs.get(kind, self._done["F" + chunk]), needs["F"]):
                continue
            if kind == "B" and self._done["W" + chunk] != count:
                kind = "I"
            for part in "IW" if kind == "B" else kind:
                self._done[part + chunk] += 1
            stage, first = self._stages[int(chunk)], self._first[int(chunk)]
            self.actions.append(Action(stage, kind, first + count))

    def finish(self) -> None:
        """Whatever is left, input gradients before weight gradients."""
        while any(self.left(cell) for cell in self._done):
            self.do("F0", "F1", "I1", "W1", "I0", "W0")


def _v(name: str, ranks: int, microbatches: int, row: Callable[[int], list[Action]]) -> Schedule:
    rows = tuple(tuple(row(rank)) for rank in range(ranks))
    return Schedule(rows, microbatches, v_placement(ranks), name)


def _require(ranks: int, microbatches: int) -> None:
    for argument, value in (("ranks", ranks), ("microbatches", microbatches)):
        if value < 1:
            raise ScheduleError(f"{argument} = {value}: want at least 1")


# Two ranks (stages 0 and 3 on rank 0), in cells of half a stage:
# rank 0 |0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
# rank 1 |.   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
def zb_v(ranks: int, microbatches: int) -> Schedule:
    """ZB-V (arXiv 2401.10241, section 6): 1F1B's memory, and no bubble if F = I = W."""
    _require(ranks, microbatches)

    def row(rank: int) -> list[Action]:
        two = TwoChunks((rank, 2 * ranks - 1 - rank), (microbatches, microbatches))
        for _ in range(2 * (ranks - rank) - 1):
            two.do("F0")
        for _ in range(rank):
            two.do("F1", "F0")
        for _ in range(ranks - rank):
            two.do("F1", "I1", "W1")
        while two.left("F0") or two.left("F1"):
            two.do("F0", "I0", "W0", "F1", "I1", "W1")
        for _ in range(rank):
            two.do("I0", "I1")
        for _ in range(ranks - rank):
            two.do("I0", "W0")
        two.finish()
        return two.actions

    return _v("zb_v", ranks, microbatches, row)


# Two ranks, in cells of half a stage:
# rank 0 |0F0 0F1 0F2 3F0 3I0 3W0 3F1 3B1==== 3F2 .   0B0==== 3I2 .   0I1 3W2 0I2 0W1 0W2
# rank 1 |.   1F0 2F0 1F1 2F1 1F2 2B0==== 2F2 1B0==== 2B1==== 1B1==== 2I2 1I2 2W2 1W2 .
def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV (DeepSeek's DualPipe, cut in half as in its README): memory p + 1 microbatches.

    Forward of one chunk next to backward of the other, so that their transfers can overlap; W is
    split from I only where it fills a gap.
    """
    _require(ranks, microbatches)

    def row(rank: int) -> list[Action]:
        two = TwoChunks((rank, 2 * ranks - 1 - rank), (microbatches, microbatches))
        return dualpipe_row(two, rank, ranks)

    return _v("dualpipe_v", ranks, microbatches, row)


def dualpipe_row(two: TwoChunks, rank: int, ranks: int) -> list[Action]:
    """The order of DualPipe for the rank that is `rank`-th of `ranks` from the outside in."""
    for _ in range(2 * (ranks - rank - 1)):
        two.do("F0")
    for _ in range(rank + 1):
        two.do("F0", "F1")
    for _ in range(ranks - rank - 1):
        two.do("I1", "W1", "F1")
    while two.left("F0"):
        two.do("F0", "B1", "F1", "B0")
    while two.left("F1"):
        two.do("B1", "F1", "B0")
    for k in range(rank + 1):
        if k < (rank + 1) // 2:
            two.do("B1", "B0")
        else:
            two.do("I1", "I0")
    while two.left("I0") or two.left("I1"):
        two.do("W1", "I0" if two.left("I0") else "I1")
    two.finish()
    return two.actions


# Three ranks, in cells of half a stage:
# rank 0 |0F0 0F1 .   .   .   5F0 5I0 5W0 .   .   .   5F1 5I1 0I0 0W0 5W1 .   .   0I1 0W1
# rank 1 |.   1F0 .   .   4F0 1F1 .   4I0 4W0 .   4F1 .   1I0 4I1 1W0 4W1 .   1I1 1W1 .
# rank 2 |.   .   2F0 3F0 .   .   2F1 .   3I0 3F1 3W0 2I0 2W0 .   3I1 3W1 2I1 2W1 .   .
def v_min(ranks: int, microbatches: int) -> Schedule:
    """V-Min (arXiv 2405.15362, section 3): about a third of 1F1B's memory.

    A block with a cell between neighbouring stages, both ways; where p is a multiple of 3 a longer
    turn keeps the cells of one rank apart.
    """
    turn = 3 if ranks % 3 == 0 else 1
    return _repeat("v_min", ranks, microbatches, (1, 1, 1, 1), (turn, 1, turn))


# Three ranks, in cells of half a stage:
# rank 0 |0F0 0F1 .   .   .   5F0 5I0 5W0 .   .   5F1 5I1 0I0 0W0 5W1 .   0I1 0W1
# rank 1 |.   1F0 .   .   4F0 1F1 .   4I0 4W0 4F1 1I0 1W0 4I1 4W1 .   1I1 1W1 .
# rank 2 |.   .   2F0 3F0 .   .   2F1 3F1 3I0 2I0 2W0 3W0 .   3I1 2I1 2W1 3W1 .
def v_half(ranks: int, microbatches: int) -> Schedule:
    """V-Half (arXiv 2405.15362, section 3): about half of 1F1B's memory.

    A block with one cell between neighbouring stages on the first chunk and two on the second.
    The turns, which keep the cells of a rank apart, were found by trying all up to 4 for p ≤ 10.
    """
    turns = (2, 1, 1) if ranks % 2 else (2, 4, 1)
    return _repeat("v_half", ranks, microbatches, (1, 2, 1, 2), turns)


def _repeat(
    name: str,
    ranks: int,
    microbatches: int,
    steps: tuple[int, int, int, int],
    turns: tuple[int, int, int],
) -> Schedule:
    """One microbatch's building block, again every 6 cells; a rank's order is that of its cells.

    `steps`: cells from a stage to the next in F of chunk 0, F of chunk 1, I of chunk 1, I of chunk
    0; `turns`: the same from chunk 0 to 1, from F to I in the last stage, and from chunk 1 to 0.
    """
    _require(ranks, microbatches)
    forward, backward = _block(ranks, steps, turns)

    def row(rank: int) -> list[Action]:
        stages = (rank, 2 * ranks - 1 - rank)
        cells = [(forward[s], Action(s, "F", 0)) for s in stages]
        cells += [(backward[s], Action(s, "I", 0)) for s in stages]
        taken = {at % _PERIOD for at, _ in cells}
        free = [at for at in range(_PERIOD) if at not in taken]
        # W as soon after its I as the two cells that are left of the period allow.
        _, weights = min(
            (sum(w - backward[s] for w, s in zip(ws, stages, strict=True)), ws)
            for ws in (
                tuple(
                    backward[s] + (f - backward[s]) % _PERIOD
                    for f, s in zip(fs, stages, strict=True)
                )
                for fs in permutations(free, 2)
            )
        )
        cells += [(at, Action(s, "W", 0)) for at, s in zip(weights, stages, strict=True)]
        times = sorted(
            (at + _PERIOD * i, action.stage, action.kind, i)
            for at, action in cells
            for i in range(microbatches)
        )
        return [Action(stage, kind, i) for _, stage, kind, i in times]

    return _v(name, ranks, microbatches, row)


def _block(
    ranks: int, steps: tuple[int, int, int, int], turns: tuple[int, int, int]
) -> tuple[list[int], list[int]]:
    """When F and I of each stage start, in cells."""
    down = [steps[0]] * (ranks - 1) + [turns[0]] + [steps[1]] * (ranks - 1)
    up = [turns[1]] + [steps[2]] * (ranks - 1) + [turns[2]] + [steps[3]] * (ranks - 1)
    forward = [0]
    for step in down:
        forward.append(forward[-1] + step)
    backward = [forward[-1]]
    for step in up:
        backward.append(backward[-1] + step)
    return forward, backward[:0:-1]
