"""DualPipe: microbatches enter from both ends, over two copies of the parameters."""

from __future__ import annotations

from ..errors import ScheduleError
from .core import Schedule
from .vshape import TwoChunks, dualpipe_row


# Four ranks; stages 0 to 3 are the first copy, 4 to 7 the second, from rank 3 to rank 0:
# rank 0 |0F0 0F1 0F2 7F3 7I3 7W3 7F4 7B4==== 7F5 .   0B0==== 7I5 .   0I1 7W5 0I2 0W1 0W2
# rank 1 |.   1F0 6F3 1F1 6F4 1F2 6B3==== 6F5 1B0==== 6B4==== 1B1==== 6I5 1I2 6W5 1W2 .
# rank 2 |.   5F3 2F0 5F4 2F1 5F5 2B0==== 2F2 5B3==== 2B1==== 5B4==== 2I2 5I5 2W2 5W5 .
# rank 3 |4F3 4F4 4F5 3F0 3I0 3W0 3F1 3B1==== 3F2 .   4B3==== 3I2 .   4I4 3W2 4I5 4W4 4W5
def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1): p + 1 microbatches, 2 × parameters.

    Each rank holds stage r of the first copy and stage p - 1 - r of the second. The first half of
    the microbatches (one more if odd) runs through the first copy. Raises ScheduleError unless the
    number of ranks is even.

    Planned and simulated only: the runtime keeps one copy of the parameters.
    """
    if ranks < 2 or ranks % 2:
        raise ScheduleError(f"ranks = {ranks}: dualpipe meets in the middle of an even number")
    if microbatches < 1:
        raise ScheduleError(f"microbatches = {microbatches}: want at least 1")
    half = (microbatches + 1) // 2
    rows = []
    for rank in range(ranks):
        ways = [(rank, half, 0), (2 * ranks - 1 - rank, microbatches - half, half)]
        if rank >= ranks // 2:
            ways.reverse()  # seen from its own end of the pipeline
        (near, count, first), (far, other, start) = ways
        two = TwoChunks((near, far), (count, other), (first, start))
        rows.append(tuple(dualpipe_row(two, min(rank, ranks - 1 - rank), ranks // 2)))
    placement = (*range(ranks), *reversed(range(ranks)))
    return Schedule(tuple(rows), microbatches, placement, "dualpipe", copies=2)
