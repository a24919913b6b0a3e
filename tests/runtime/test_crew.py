"""The executor's Python face: where ranks meet, what connects them, what a run leaves behind."""

from __future__ import annotations

import os

import pytest

from crews import PipeWorld, Relay, crew_of, forked, local
from zbpipe.errors import ConfigError, StageError, ZbpipeError
from zbpipe.program import compile
from zbpipe.runtime.control import cause_of, describe, error_of
from zbpipe.runtime.executor import Crew
from zbpipe.runtime.world import World
from zbpipe.schedule import build
from zbpipe.schedule.core import Action

PROGRAMS = compile(build("1f1b", 3, 4))


def test_local_ranks_are_connected_in_place():
    crew, _ = local(PROGRAMS)
    assert crew.transports() == dict.fromkeys([(0, 1), (1, 0), (1, 2), (2, 1)], "local")
    crew.close()


def transports(world):
    crew = crew_of(world, PROGRAMS)
    return crew.transports()


def test_separate_ranks_are_connected_by_shared_memory():
    found = [outcome.get() for outcome in forked(transports, 3)]
    assert found == [
        dict.fromkeys([(0, 1), (1, 0)], "shm"),
        dict.fromkeys([(0, 1), (1, 0), (1, 2), (2, 1)], "shm"),
        dict.fromkeys([(1, 2), (2, 1)], "shm"),
    ]


def elsewhere(world):
    os.environ["ZBPIPE_HOST"] = f"host{world.rank // 2}"
    crew = crew_of(world, PROGRAMS)
    crew.close()
    return crew.transports()


def test_ranks_on_other_hosts_are_connected_by_tcp():
    found = [outcome.get() for outcome in forked(elsewhere, 3)]
    assert found == [
        {(0, 1): "shm", (1, 0): "shm"},
        {(0, 1): "shm", (1, 0): "shm", (1, 2): "tcp", (2, 1): "tcp"},
        {(1, 2): "tcp", (2, 1): "tcp"},
    ]


def test_a_world_of_one_needs_no_channels():
    programs = compile(build("zb_h2", 1, 3))
    crew, loaded = local(programs)
    done = []
    crew.run(loaded, {0: done.append})
    assert done == list(range(9))
    timeline = crew.timeline(loaded)
    assert [span.action for span in timeline.compute(0)] == [
        programs.ranks[0].instructions[i].action for i in done
    ]
    assert (timeline.kind, timeline.ranks) == ("measured", 1)
    crew.close()


def test_a_timeline_is_of_the_last_run_only():
    crew, loaded = local(PROGRAMS)
    ends = []
    for run in range(3):
        crew.run(loaded, {r: Relay(crew, loaded, r, 0, 100).begin(run) for r in range(3)})
        spans = crew.timeline(loaded).spans
        assert len(spans) == sum(len(p.instructions) for p in PROGRAMS.ranks)
        if ends:
            assert min(span.start for span in spans) > ends[-1]
        ends.append(max(span.end for span in spans))
    crew.close()


def test_a_closed_crew_says_so():
    crew, loaded = local(PROGRAMS)
    crew.close()
    crew.close()
    with pytest.raises(ZbpipeError, match="closed: wrap the model again"):
        crew.run(loaded, dict.fromkeys(range(3)))


def test_a_run_without_a_callback_is_an_error():
    crew, loaded = local(PROGRAMS)
    with pytest.raises(StageError, match=r"rank 0, stage 0, F of microbatch 0.*no callback"):
        crew.run(loaded, dict.fromkeys(range(3)))
    crew.close()


def test_failing_outside_a_run_stops_the_next_one():
    crew, loaded = local(PROGRAMS)
    crew.fail(2, ValueError("the batch is gone"), Action(2, "F", 3))
    crew.fail(1, ValueError("a consequence"))
    with pytest.raises(StageError) as caught:
        crew.run(loaded, dict.fromkeys(range(3)))
    error = caught.value
    assert (error.rank, error.stage, error.action, error.microbatch) == (2, 2, "F", 3)
    assert error.cause == "ValueError: the batch is gone"
    crew.close()


def test_a_timeout_must_be_positive():
    with pytest.raises(RuntimeError, match="timeout must be positive"):
        Crew(World(1, (0,)), timeout=0.0)


def test_failures_read_as_errors():
    stage = error_of((3, 1, "W", 7, "r", "ValueError: no"))
    assert type(stage) is StageError
    assert str(stage) == "rank 3, stage 1, W of microbatch 7: ValueError: no"
    bare = error_of((3, -1, "-", -1, "d", "the process of this rank died"))
    assert str(bare) == "rank 3: the process of this rank died"
    assert (bare.stage, bare.action, bare.microbatch) == (None, None, None)
    assert type(error_of((0, -1, "-", -1, "x", "m = 0"))) is ConfigError
    assert [cause_of(e) for e in (ConfigError("a"), KeyError("b"))] == ["x", "r"]
    assert describe(KeyError("b")) == "KeyError: 'b'"


def test_pipe_worlds_gather_in_rank_order():
    assert [o.get() for o in forked(PipeWorld.gather, 3, "hi")] == [["hi"] * 3] * 3
