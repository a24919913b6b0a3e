"""`zbpipe schedule`, as a user runs it: figures, files, and what it says to bad input."""

import json
import subprocess
import sys

import pytest

from zbpipe.cli import main
from zbpipe.costs import Costs
from zbpipe.errors import ConfigError
from zbpipe.schedule import Schedule, build
from zbpipe.schedule.check import check
from zbpipe.schedule.placements import chunked, placement
from zbpipe.schedule.simulate import planned_peak, simulate

SMALL = ["schedule", "--stages", "4", "--microbatches", "8", "--time-limit", "0.2"]
TIMED = ["--times", "18.522,18.086,9.337", "--comm", "0.601", "--stash", "0.4"]


def run(capsys, *arguments):
    """(exit status, standard output, standard error)"""
    status = main([*map(str, arguments)])
    return status, *capsys.readouterr()


def test_figures_and_files_tell_of_one_schedule(capsys, tmp_path):
    csv, svg, figures = (tmp_path / f"s.{kind}" for kind in ("csv", "svg", "json"))
    files = ["--csv", csv, "--svg", svg, "--json", figures]
    status, out, err = run(capsys, *SMALL, *TIMED, "--memory", "1.5p", *files)
    assert (status, err) == (0, "")
    schedule = Schedule.from_csv(csv.read_text())
    costs = Costs.uniform(4, 18.522, 18.086, 9.337, 0.601, 1.0, 0.4)
    check(schedule, costs, 6.0)
    timeline = simulate(schedule, costs)
    told = json.loads(figures.read_text())
    assert told["bubble"] == {name: timeline.bubble(name) for name in ("stage", "sync")}
    assert told["bound"]["stage"] <= timeline.cost("stage") * (1 + 1e-9)
    assert told["bound"]["sync"] <= timeline.cost("sync") * (1 + 1e-9)
    gap = timeline.cost("stage") / told["bound"]["stage"] - 1
    assert told["gap"] == pytest.approx(gap, abs=1e-9)
    assert told["peak"] == [planned_peak(schedule, costs, rank) for rank in range(4)]
    names = ("schedule", "placement", "ranks", "microbatches", "objective", "status")
    assert [told[name] for name in names[:5]] == ["search", "linear", 4, 8, "stage"]
    assert told["status"] in ("optimal", "feasible")
    assert told["seconds"] > 0
    assert svg.read_text().startswith("<svg")
    for text in (f"{timeline.bubble('stage'):.4f}", "gap", "bound", "peak", "rank 3"):
        assert text in out


@pytest.mark.parametrize(
    ("memory", "more", "budget"),
    [
        ("1.5p", [], 6.0),
        ("5", [], 5.0),
        ("6,5,4,3", [], [6.0, 5.0, 4.0, 3.0]),
        ("10GiB", ["--act", "2GiB", "--stash", "1GiB"], 5.0),
        ("3", ["--placement", "v"], 3.0),
    ],
)
def test_memory_is_kept_in_every_spelling(capsys, tmp_path, memory, more, budget):
    csv = tmp_path / "s.csv"
    assert run(capsys, *SMALL, "--memory", memory, *more, "--csv", csv)[0] == 0
    schedule = Schedule.from_csv(csv.read_text())
    stash = 0.5 if "--act" in more else 1.0
    check(schedule, chunked(Costs.uniform(4, stash=stash), schedule.placement), budget)


def test_a_family_and_its_file_go_there_and_back(capsys, tmp_path):
    csv = tmp_path / "h1.csv"
    status, out, _ = run(capsys, *SMALL, "--family", "zb-h1", "--csv", csv)
    assert status == 0
    assert csv.read_text() == build("zb_h1", 4, 8).to_csv()
    status, again, _ = run(capsys, "schedule", "--load", csv)
    assert status == 0
    assert out.splitlines()[1:6] == again.splitlines()[1:6]
    assert "checked" in again


def test_overlapped_cells_of_torch_are_read_and_never_written(capsys, tmp_path):
    csv, ours = tmp_path / "torch.csv", tmp_path / "ours.csv"
    csv.write_text("0F0,0F1,,0B0,0B1\n,1F0,(1F1;1B0)OVERLAP_F_B,1B1\n")
    assert run(capsys, "schedule", "--load", csv, "--csv", ours)[0] == 0
    assert ours.read_text() == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"


def test_objective_and_placement_are_those_asked_for(capsys, tmp_path):
    figures = tmp_path / "f.json"
    tight = ["--memory", "0.75p", "--placement", "auto", "--objective", "sync", "--json", figures]
    assert run(capsys, *SMALL, *tight)[0] == 0
    told = json.loads(figures.read_text())
    assert (told["placement"], told["objective"]) == ("v", "sync")


def test_costs_come_from_a_file(capsys, tmp_path):
    path, figures = tmp_path / "costs.json", tmp_path / "f.json"
    costs = Costs((1, 2, 3), (2, 2, 2), (1, 1, 1), (0.5, 0.25), (1, 2, 3), (1, 1, 1))
    path.write_text(json.dumps(costs.to_dict()))
    more = ["--costs", path, "--memory", "2p", "--json", figures, "--time-limit", "0.2"]
    status, _, _ = run(capsys, "schedule", "--microbatches", "6", *more)
    assert status == 0
    assert json.loads(figures.read_text())["bound"]["stage"] >= 6 * 6


def test_chunks_may_have_costs_of_their_own(capsys, tmp_path):
    path, csv = tmp_path / "costs.json", tmp_path / "s.csv"
    costs = Costs((1, 2, 3, 4), (2,) * 4, (1,) * 4, (0.5, 0, 0.5), (1,) * 4, (1,) * 4)
    path.write_text(json.dumps(costs.to_dict()))
    own = ["--stages", "2", "--microbatches", "4", "--placement", "v", "--costs", path]
    status, _, _ = run(capsys, "schedule", *own, "--time-limit", "0.2", "--csv", csv)
    assert status == 0
    assert Schedule.from_csv(csv.read_text()).placement == placement("v", 2)


def test_compare_is_a_table_that_marks_what_is_over_the_budget(capsys):
    _, out, _ = run(capsys, *SMALL, "--memory", "1p", "--compare", "1f1b,zb1p,zb2p")
    table = {line.split()[0]: line for line in out.splitlines()[-4:]}
    assert list(table) == ["search", "1f1b", "zb1p", "zb2p"]
    assert [name for name, line in table.items() if "over the budget" in line] == ["zb2p"]


def test_big_pictures_are_cut(capsys):
    big = ["schedule", "--stages", "40", "--microbatches", "80", "--family", "1f1b"]
    _, out, _ = run(capsys, *big, "--width", "100")
    assert max(map(len, out.splitlines()[1:30])) <= 100
    assert "8 of 40 ranks more" in out


BAD = [
    (["--memory", "0.1p"], "stage 0 needs at least 1 "),
    (["--memory", "3,3"], "--memory '3,3' has 2 entries"),
    (["--memory", "lots"], "--memory 'lots', entry 0"),
    (["--memory", "-1"], "--memory '-1'"),
    (["--times", "1,nan,2"], "--times '1,nan,2', entry 1 = 'nan'"),
    (["--times", "1,-2,2"], "entry 1 = '-2'"),
    (["--times", "1,2"], "--times '1,2' has 2 entries: want 3"),
    (["--comm", "1,2"], "--comm '1,2' has 2 entries: want 1 or 3"),
    (["--family", "zbb"], "did you mean"),
    (["--compare", "1f1b,zbb"], "did you mean"),
    (["--placement", "zig"], "--placement 'zig': want linear, v or auto"),
    (["--objective", "step"], "--objective 'step'"),
    (["--family", "zb_h2", "--memory", "1p"], "zb_h2 does not fit"),
    (["--microbatches", "0"], "--microbatches 0"),
    (["--stages", "2000"], "--stages 2000"),
    (["--time-limit", "0"], "--time-limit 0"),
    (["--csv", "no/such/folder/x.csv"], "there is no folder"),
    (["--costs", "no.json"], "there is no such file"),
    (["--load", "no.csv"], "there is no such file"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_input_is_named_and_exits_with_2(capsys, options, message):
    status, _, err = run(capsys, *SMALL, *options)
    assert status == 2
    assert err.startswith("zbpipe schedule: ")
    assert message in err
    assert "Traceback" not in err


WRONG = [
    ("0F0,0I0,zz\n", "line 1, cell 3: 'zz'"),
    ("0F0,0B0\n1F0,0B0\n", "stage 0 is already on line 1"),
    ("0F0,0W0,0I0\n", ">0W0<"),
    ("0F0,0B0,0B0\n", ">0B0<"),
    ("0F0,0F1,0B0\n", ">?<"),
    ("0B0,0F0\n", ">0B0<"),
    ("", "holds no action"),
    ("0F0,1B0,0B0,1F0\n", ">1B0<"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_a_wrong_order_shows_where(capsys, tmp_path, text, message):
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    status, _, err = run(capsys, "schedule", "--load", path)
    assert status == 2
    assert message in err


def test_a_deadlock_shows_where_each_rank_is_stuck(capsys, tmp_path):
    path = tmp_path / "stuck.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    status, _, err = run(capsys, "schedule", "--load", path)
    assert status == 2
    assert ">0B0<" in err
    assert ">1F1<" in err


def test_a_loaded_order_is_held_to_the_budget_and_the_options(capsys, tmp_path):
    path = tmp_path / "h2.csv"
    path.write_text(build("zb_h2", 4, 8).to_csv())
    assert run(capsys, "schedule", "--load", path, "--memory", "2p")[0] == 0
    status, _, err = run(capsys, "schedule", "--load", path, "--memory", "1p")
    assert status == 2
    assert "does not fit" in err
    status, _, err = run(capsys, "schedule", "--load", path, "--stages", "5")
    assert status == 2
    assert "--stages 5" in err


def test_the_command_does_without_torch():
    code = "import sys; from zbpipe.cli import main; main(['schedule', '--stages', '2', "
    code += "'--microbatches', '2']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_amounts():
    from zbpipe.cli.amounts import memory, size

    assert memory("1.5p", [2.0, 4.0]) == [6.0, 12.0]
    assert memory("3", [2.0, 4.0]) == [6.0, 12.0]
    assert memory("1KiB,1.5 kB", [2.0, 4.0]) == [1024.0, 1500.0]
    assert size("--act", "2 MiB") == 2 * 2**20
    with pytest.raises(ConfigError, match="--act 'x'"):
        size("--act", "x")
