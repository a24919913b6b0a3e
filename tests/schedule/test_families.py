"""The shapes of the families, against their tables and their definitions."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbpipe.costs import Costs
from zbpipe.errors import ScheduleError
from zbpipe.schedule import FAMILIES, LINEAR, build, forward_only, resolve
from zbpipe.schedule.check import check
from zbpipe.schedule.render import text
from zbpipe.schedule.simulate import microbatches_held, simulate

TABLES = {
    "gpipe": """
rank 0 |F0 F1 F2 F3 F4 .  .  .  .  .  .  B0=== B1=== B2=== B3=== B4===
rank 1 |.  F0 F1 F2 F3 F4 .  .  .  B0=== B1=== B2=== B3=== B4=== .  .
rank 2 |.  .  F0 F1 F2 F3 F4 B0=== B1=== B2=== B3=== B4=== .  .  .  .""",
    "1f1b": """
rank 0 |F0 F1 F2 .  .  .  .  B0=== F3 B1=== F4 B2=== .  B3=== .  B4===
rank 1 |.  F0 F1 .  .  B0=== F2 B1=== F3 B2=== F4 B3=== .  B4=== .  .
rank 2 |.  .  F0 B0=== F1 B1=== F2 B2=== F3 B3=== F4 B4=== .  .  .  .""",
    "zb_h1": """
rank 0 |F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
rank 1 |.  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
rank 2 |.  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4""",
    "zb_h2": """
rank 0 |F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .
rank 1 |.  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .
rank 2 |.  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4""",
}

SIZES = st.tuples(st.integers(1, 9), st.integers(1, 20))


@pytest.mark.parametrize("name", LINEAR)
def test_three_ranks_and_five_microbatches_are_the_table(name):
    assert text(build(name, 3, 5)) == TABLES[name].strip("\n")


def test_forward_only_is_its_table():
    assert (
        text(forward_only(3, 6))
        == """
rank 0 |F0 F1 F2 F3 F4 I0 F5 I1 .  I2 .  I3 .  I4 .  I5
rank 1 |.  F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 .  I4 .  I5 .
rank 2 |.  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 .  .""".strip("\n")
    )


@settings(derandomize=True)
@given(st.sampled_from(sorted(LINEAR)), SIZES)
def test_every_family_passes_check_in_ascending_order(name, size):
    ranks, microbatches = size
    schedule = build(name, ranks, microbatches)
    check(schedule)
    assert (schedule.ranks, schedule.microbatches, schedule.name) == (ranks, microbatches, name)
    for row in schedule.rows:
        for kind in "FIWB":
            order = [action.microbatch for action in row if action.kind == kind]
            assert order in ([], list(range(microbatches)))


@settings(derandomize=True)
@given(SIZES)
def test_warm_up_and_delay_are_as_defined(size):
    ranks, m = size
    for name, warm_up, delay in [
        ("zb_h1", lambda s: ranks - s, lambda s: s),
        ("zb_h2", lambda s: 2 * (ranks - s) - 1, lambda s: 2 * s),
    ]:
        for s, row in enumerate(build(name, ranks, m).rows):
            kinds = [action.kind for action in row]
            assert kinds.index("I") == min(m, warm_up(s))
            place = {(action.kind, action.microbatch): at for at, action in enumerate(row)}
            for i in range(delay(s), m):
                assert place["W", i - delay(s)] == place["I", i] + 1


@settings(derandomize=True)
@given(SIZES)
def test_memory_in_microbatches(size):
    ranks, m = size
    left = [ranks - s for s in range(ranks)]
    assert microbatches_held(build("gpipe", ranks, m)) == (m,) * ranks
    for name in ("1f1b", "zb_h1"):
        assert microbatches_held(build(name, ranks, m)) == tuple(min(m, n) for n in left)
    held = microbatches_held(build("zb_h2", ranks, m))
    assert held == tuple(min(m, 2 * n - 1) for n in left)
    # Stashes included, H1 keeps to 1F1B's largest rank (1p) and H2 to twice that, less one.
    assert max(microbatches_held(build("zb_h1", ranks, m), "W")) == min(m, ranks)
    assert max(microbatches_held(build("zb_h2", ranks, m), "W")) == min(m, 2 * ranks - 1)


@settings(derandomize=True)
@given(SIZES)
def test_forward_only_never_waits_and_holds_no_more_for_more_microbatches(size):
    ranks, m = size
    schedule = forward_only(ranks, m)
    for row in schedule.rows:
        for kind in "FI":
            assert [a.microbatch for a in row if a.kind == kind] == list(range(m))
    held = microbatches_held(schedule)
    assert held == tuple(min(m, 2 * (ranks - s) - 1) for s in range(ranks))
    # F = 1 and I = 0: a pipe of p stages takes m + p - 1, whatever comes back.
    timeline = simulate(schedule, Costs.uniform(ranks, f=1, i=0, w=0))
    assert timeline.makespan() == m + ranks - 1


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("gpipe", "gpipe"),
        ("GPipe", "gpipe"),
        ("1F1B", "1f1b"),
        ("one_f_one_b", "1f1b"),
        ("zb1p", "zb_h1"),
        ("ZB1P", "zb_h1"),
        ("zb-2p", "zb_h2"),
        ("ZB-H2", "zb_h2"),
        ("zbh1", "zb_h1"),
    ],
)
def test_spellings_resolve(spelling, name):
    assert resolve(spelling) == name
    assert build(spelling, 2, 3) == FAMILIES[name](2, 3)


@pytest.mark.parametrize(
    ("wrong", "nearest"), [("zb3p", "zb"), ("1f2b", "1f1b"), ("gpip", "gpipe"), ("ZB_H3", "zb_h")]
)
def test_an_unknown_name_is_answered_with_the_nearest_and_all(wrong, nearest):
    with pytest.raises(ScheduleError, match=f"did you mean '{nearest}") as caught:
        build(wrong, 2, 2)
    assert all(name in str(caught.value) for name in [*FAMILIES, "zb1p", "zb2p"])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("ranks", "microbatches", "named"), [(0, 1, "ranks = 0"), (2, 0, "microbatches = 0")]
)
def test_sizes_below_one_are_refused(name, ranks, microbatches, named):
    with pytest.raises(ScheduleError, match=named):
        build(name, ranks, microbatches)
