"""Interleaved shapes: v chunks a rank, stage s on rank s mod p, for any number of microbatches."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import ScheduleError
from .core import Action, Schedule


# Two ranks, two chunks each (stages 0 and 2 on rank 0), in cells of half a stage:
# rank 0 |0F0 0F1 0F2 2F0 2F1 2F2 .   2B0==== .   2B1==== .   2B2==== 0B0==== 0B1==== 0B2====
# rank 1 |.   1F0 1F1 1F2 3F0 3B0==== 3F1 3B1==== 3F2 3B2==== 1B0==== 1B1==== 1B2==== .   .
def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B (arXiv 2104.04473, section 2.2): the bubble of 1F1B over `chunks`.

    Microbatches go round in groups of about p, as evenly as they come: where Megatron demands a
    multiple of p, the groups here are larger by one (m ≥ p), or there is a single one (m < p).
    """
    return _looped("interleaved", ranks, microbatches, chunks, split=False)


# The same two ranks and chunks:
# rank 0 |0F0 0F1 0F2 2F0 2F1 2F2 2I0 2W0 2I1 2W1 .   2I2 2W2 0I0 0W0 0I1 0W1 0I2 0W2
# rank 1 |.   1F0 1F1 1F2 3F0 3I0 3F1 3I1 3W0 3F2 3I2 3W1 1I0 3W2 1I1 1W0 1I2 1W1 1W2
def interleaved_zb(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B with I in place of B; rank s runs W behind I by s, so that W fills gaps.

    The idea of ZB-H1 (arXiv 2401.10241, section 2) on interleaved chunks.
    """
    return _looped("interleaved_zb", ranks, microbatches, chunks, split=True)


def _looped(name: str, ranks: int, microbatches: int, chunks: int, split: bool) -> Schedule:
    for argument, value in (
        ("ranks", ranks),
        ("microbatches", microbatches),
        ("chunks", chunks),
    ):
        if value < 1:
            raise ScheduleError(f"{argument} = {value}: want at least 1")
    groups = _groups(microbatches, ranks)
    rows = tuple(tuple(_row(rank, ranks, chunks, groups, split)) for rank in range(ranks))
    placement = tuple(stage % ranks for stage in range(ranks * chunks))
    return Schedule(rows, microbatches, placement, name)


def _groups(microbatches: int, ranks: int) -> list[range]:
    """As many groups of at least `ranks` as there are, the larger first; one if there are none."""
    count = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, count)
    ends = [(i + 1) * size + min(i + 1, larger) for i in range(count)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _row(rank: int, ranks: int, chunks: int, groups: list[range], split: bool) -> Iterator[Action]:
    forward = [Action(c * ranks + rank, "F", i) for g in groups for c in range(chunks) for i in g]
    kind = "I" if split else "B"
    backward = [
        Action(c * ranks + rank, kind, i)
        for g in groups
        for c in reversed(range(chunks))
        for i in g
    ]
    # Down and up the ranks below, as many as it takes until the first gradient is back; with one
    # chunk that is 1F1B's own warm-up, which lets the next rank's forward wait less.
    rest = ranks - 1 - rank
    warm_up = rest if chunks == 1 else 2 * rest + (chunks - 1) * len(groups[0])
    warm_up = min(warm_up, len(forward))
    yield from forward[:warm_up]
    for k, action in enumerate(backward):
        yield from forward[warm_up + k : warm_up + k + 1]
        yield action
        if split and k >= rank:
            yield backward[k - rank]._replace(kind="W")
    if split:
        for action in backward[max(0, len(backward) - rank) :]:
            yield action._replace(kind="W")
