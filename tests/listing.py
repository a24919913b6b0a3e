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


class Lister:
    """The rules in csrc/schedule/lister.hpp, for one policy."""

    def __init__(self, costs, placed, m, limits, policy):
        self.costs, self.placed, self.m, self.limits = costs, placed, m, limits
        self.policy = policy
        ranks, self.last = max(placed) + 1, len(placed) - 1
        self.mine = [[s for s, owner in enumerate(placed) if owner == r] for r in range(ranks)]
        self.bytes = [max(pair) for pair in zip(costs.act, costs.stash, strict=True)]
        self.rows, self.due = [[] for _ in self.mine], [[] for _ in self.mine]
        self.free = [0.0] * ranks
        self.done = {(s, k): 0 for s in range(self.last + 1) for k in "FIW"}
        first = {("F", 0, i): 0.0 for i in range(m)}
        self.there = first | {("I", self.last, i): 0.0 for i in range(m)}
        self.own_f = {}

    def run(self):
        """Rows of (stage, kind, microbatch), or None where the rules get stuck."""
        events = [(0.0, rank) for rank in range(len(self.mine))]
        while events:
            now, rank = heapq.heappop(events)
            action = self.choose(rank, now) if now >= self.free[rank] else None
            if action is not None:
                self.perform(rank, now, *action, events)
        whole = all(len(row) == 3 * self.m * len(self.mine[r]) for r, row in enumerate(self.rows))
        return self.rows if whole else None

    def perform(self, rank, now, s, kind, events):
        i = self.done[s, kind]
        self.done[s, kind] += 1
        self.rows[rank].append((s, kind, i))
        seconds = {"F": "forward", "I": "input_grad", "W": "weight_grad"}[kind]
        end = self.free[rank] = now + getattr(self.costs, seconds)[s]
        heapq.heappush(events, (end, rank))
        if kind == "W":
            self.due[rank].pop(0)
            return
        if kind == "I":
            self.due[rank].append(s)
        else:
            self.own_f[s, i] = end
        to = s + (1 if kind == "F" else -1)
        if 0 <= to <= self.last:
            apart = self.placed[s] != self.placed[to]
            arrival = end + (self.costs.comm[min(s, to)] if apart else 0.0)
            self.there[kind, to, i] = arrival
            heapq.heappush(events, (arrival, self.placed[to]))

    def held(self, s):
        ahead = self.done[s, "F"] - self.done[s, "I"]
        kept = self.done[s, "I"] - self.done[s, "W"]
        return ahead * self.bytes[s] + kept * self.costs.stash[s]

    def room(self, rank, stage):
        mine, bytes_, done = self.mine[rank], self.bytes, self.done
        count = {s: done[s, "F"] + (s == stage) for s in mine}
        needs = [sum(map(self.held, mine)) + bytes_[stage]]
        for t in mine:
            if t > stage:
                younger = [(count[s] - done[t, "F"]) * bytes_[s] for s in mine if s < t]
                if self.policy["strict"]:
                    below = sum(self.held(s) + (s == stage) * bytes_[s] for s in mine if s < t)
                    needs.append(below + bytes_[t])
                needs.append(sum(younger) + sum(bytes_[s] for s in mine if s >= t))
        return all(need <= self.limits[rank] * (1 + 1e-9) for need in needs)

    def options(self, rank, now):
        """[(key, stage, kind, when ready)], and the least key of an F that lacks only memory."""
        policy, found, blocked = self.policy, [], math.inf
        for s in self.mine[rank]:
            f, b = self.done[s, "F"], self.done[s, "I"]
            if f < self.m and f - b < policy["flight"][s]:
                key = policy["forward_key"][s] + f * policy["interval"]
                ready = self.there.get(("F", s, f), math.inf)
                if self.room(rank, s):
                    found.append((key, s, "F", ready))
                elif ready <= now:
                    blocked = min(blocked, key)
            if b < f:
                key = policy["backward_key"][s] + b * policy["interval"]
                ready = max(self.there.get(("I", s, b), math.inf), self.own_f[s, b])
                found.append((key, s, "I", ready))
        return found, blocked

    def choose(self, rank, now):
        policy, due = self.policy, self.due[rank]
        options, blocked = self.options(rank, now)
        near = [o for o in options if o[3] <= now + policy["patience"]]
        best = min(near, key=lambda option: option[0], default=None)
        if not due:
            return best[1:3] if best and best[3] <= now else None
        weight = (due[0], "W")
        if blocked < (best[0] if best else math.inf):
            return weight
        if best and best[2] == "F" and len(due) > policy["backlog"][rank]:
            return weight
        if best and best[3] <= now:
            return best[1:3]
        arrival = min((ready for *_, ready in options), default=math.inf)
        until = best[3] if best else arrival
        wide = until - now >= policy["gap"] * self.costs.weight_grad[weight[0]]
        return weight if wide else None


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
