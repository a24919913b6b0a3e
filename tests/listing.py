"""Plain Python to hold the schedulers to: the lister's rules, every order there is, and cases."""

import heapq
import math

from hypothesis import strategies as st

from zbpipe.costs import Costs
from zbpipe.errors import MemoryBudgetError, ScheduleError
from zbpipe.schedule import Action, Schedule
from zbpipe.schedule.check import check
from zbpipe.schedule.limits import least_budget
from zbpipe.schedule.placements import placement
from zbpipe.schedule.simulate import simulate

TIMES = st.integers(0, 12).map(lambda n: n / 4)
BYTES = st.integers(1, 8).map(lambda n: n / 2)


def list_rows(costs, placed, m, limits, policy):
    """Rows of (stage, kind, microbatch) by the rules in csrc/schedule/lister.hpp, or None."""
    ranks, last = max(placed) + 1, len(placed) - 1
    mine = [[s for s, owner in enumerate(placed) if owner == r] for r in range(ranks)]
    seconds = {"F": costs.forward, "I": costs.input_grad, "W": costs.weight_grad}
    bytes_ = [max(pair) for pair in zip(costs.act, costs.stash, strict=True)]
    rows, due, free = ([[] for _ in mine], [[] for _ in mine], [0.0] * ranks)
    done = {(s, k): 0 for s in range(last + 1) for k in "FIW"}
    there = {("F", 0, i): 0.0 for i in range(m)} | {("I", last, i): 0.0 for i in range(m)}
    own_f = {}

    def held(s):
        ahead, kept = done[s, "F"] - done[s, "I"], done[s, "I"] - done[s, "W"]
        return ahead * bytes_[s] + kept * costs.stash[s]

    def room(rank, stage):
        count = {s: done[s, "F"] + (s == stage) for s in mine[rank]}
        needs = [sum(map(held, mine[rank])) + bytes_[stage]]
        for t in mine[rank]:
            if t > stage:
                younger = [(count[s] - done[t, "F"]) * bytes_[s] for s in mine[rank] if s < t]
                if policy["strict"]:
                    below = sum(held(s) + (s == stage) * bytes_[s] for s in mine[rank] if s < t)
                    needs.append(below + bytes_[t])
                needs.append(sum(younger) + sum(bytes_[s] for s in mine[rank] if s >= t))
        return all(need <= limits[rank] * (1 + 1e-9) for need in needs)

    def choose(rank, now):
        options, blocked, arrival = [], math.inf, math.inf
        for s in mine[rank]:
            f, b = done[s, "F"], done[s, "I"]
            if f < m and f - b < policy["flight"][s]:
                key = policy["forward_key"][s] + f * policy["interval"]
                ready = there.get(("F", s, f), math.inf)
                if room(rank, s):
                    options.append((key, s, "F", ready))
                elif ready <= now:
                    blocked = min(blocked, key)
            if b < f:
                key = policy["backward_key"][s] + b * policy["interval"]
                ready = max(there.get(("I", s, b), math.inf), own_f[s, b])
                options.append((key, s, "I", ready))
        arrival = min((ready for *_, ready in options), default=math.inf)
        near = [o for o in options if o[3] <= now + policy["patience"]]
        best = min(near, key=lambda option: option[0], default=None)
        if due[rank]:
            weight = (due[rank][0], "W")
            if blocked < (best[0] if best else math.inf):
                return weight
            if best and best[2] == "F" and len(due[rank]) > policy["backlog"][rank]:
                return weight
            if best and best[3] <= now:
                return best[1:3]
            until = best[3] if best else arrival
            wide = until - now >= policy["gap"] * costs.weight_grad[weight[0]]
            return weight if wide else None
        return best[1:3] if best and best[3] <= now else None

    events = [(0.0, rank) for rank in range(ranks)]
    while events:
        now, rank = heapq.heappop(events)
        action = choose(rank, now) if now >= free[rank] else None
        if action is None:
            continue
        s, kind = action
        i = done[action]
        done[action] += 1
        rows[rank].append((s, kind, i))
        end = free[rank] = now + seconds[kind][s]
        heapq.heappush(events, (end, rank))
        if kind == "W":
            due[rank].pop(0)
            continue
        if kind == "I":
            due[rank].append(s)
        else:
            own_f[s, i] = end
        to = s + (1 if kind == "F" else -1)
        if 0 <= to <= last:
            hop = costs.comm[min(s, to)] if placed[s] != placed[to] else 0.0
            there[kind, to, i] = end + hop
            heapq.heappush(events, (end + hop, placed[to]))
    return rows if all(len(row) == 3 * m * len(mine[r]) for r, row in enumerate(rows)) else None


def placements(ranks):
    """linear and v, looped, up and down twice, and one where neighbours share a rank."""
    line = tuple(range(ranks))
    pairs = tuple(rank for rank in line for _ in range(2))
    return [line, placement("v", ranks), line * 2, (*line, *line[::-1]) * 2, pairs]


@st.composite
def problems(draw, most_ranks=4, most_microbatches=7):
    """(costs, placement, microbatches, budget): stages that differ, budgets from the least up."""
    ranks = draw(st.integers(1, most_ranks))
    placed = draw(st.sampled_from(placements(ranks)))
    n = len(placed)

    def each(values, count=n):
        return draw(st.lists(values, min_size=count, max_size=count))

    act = each(BYTES)
    costs = Costs(
        forward=each(TIMES),
        input_grad=each(TIMES),
        weight_grad=each(TIMES),
        comm=each(TIMES, n - 1),
        act=act,
        stash=[
            share * whole
            for share, whole in zip(each(st.sampled_from([0, 0.5, 1])), act, strict=True)
        ],
        transient=each(st.integers(0, 2)),
    )
    least = least_budget(costs, placed)
    extra = draw(st.lists(st.integers(0, 12), min_size=ranks, max_size=ranks))
    budget = draw(
        st.sampled_from(
            [[a + b for a, b in zip(least, extra, strict=True)], max(least) * 1.5, None]
        )
    )
    return costs, placed, draw(st.integers(1, most_microbatches)), budget


def best_of_all(costs, placed, m, budget, objective):
    """The least cost over every order of every rank, by trying them all: ascending microbatches."""
    ranks = range(max(placed) + 1)

    def words(counts):
        if not any(sum(c) for c in counts.values()):
            yield ()
            return
        for s, (f, i, w) in counts.items():
            for at, left in enumerate((f, i, w)):
                after = [f, i, w]
                after[at] -= 1
                if left and after[0] <= after[1] <= after[2]:
                    for rest in words(counts | {s: tuple(after)}):
                        yield ("FIW"[at], s), *rest

    def rows(rank):
        mine = [s for s, owner in enumerate(placed) if owner == rank]
        for word in words(dict.fromkeys(mine, (m, m, m))):
            seen, row = {}, []
            for kind, s in word:
                i = seen[kind, s] = seen.get((kind, s), -1) + 1
                row.append((s, kind, i))
            yield tuple(row)

    def orders(rank):
        if rank == len(ranks):
            yield ()
            return
        for row in rows(rank):
            for rest in orders(rank + 1):
                yield row, *rest

    best = math.inf
    for order in orders(0):
        schedule = Schedule(tuple(tuple(Action(*a) for a in row) for row in order), m, placed)
        try:
            check(schedule, costs, budget)
        except (MemoryBudgetError, ScheduleError):
            continue
        best = min(best, simulate(schedule, costs).cost(objective))
    return best
