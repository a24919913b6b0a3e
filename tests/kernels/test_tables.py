"""Which configuration is chosen: a measured one that fits, else a default for every case."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path

import pytest
import torch

from zbpipe.errors import ConfigError
from zbpipe.kernels import dispatch, tables, target, tune

SHAPE = (2048, 4096, 11008)


@pytest.mark.parametrize("kernel", ["dgrad", "wgrad"])
@pytest.mark.parametrize("architecture", target.SUPPORTED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("descriptors", [True, False])
def test_there_is_a_default_for_everything(kernel, architecture, dtype, descriptors) -> None:
    config = tables.choose(kernel, architecture, dtype, (1, 17, 129), descriptors)
    assert config.how
    assert config.tma == (descriptors and architecture >= 90 and dtype != torch.float32)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes entries as `tune` does, and lets `choose` see them."""

    def write(*entries: dict) -> None:
        path = tmp_path / "measured.json"
        path.write_text(json.dumps({"entries": entries}))
        monkeypatch.setattr(tables, "MEASURED", path)
        forget()

    def forget() -> None:
        tables.measured.cache_clear()
        tables.choose.cache_clear()

    yield write
    monkeypatch.undo()
    forget()


def entry(rows: int, how: str, **changes: object) -> dict:
    config = {"rows": 64, "outs": 128, "ins": 256, "warps": 8, "stages": 4, "how": how}
    config["tma"] = bool(changes.pop("tma", False))
    found = {"kernel": "wgrad", "architecture": 90, "dtype": "bfloat16"}
    return found | {"rows": rows, "outs": 4096, "ins": 11008, "config": config} | changes


def choose(rows: int, descriptors: bool = True) -> str:
    shape = (rows, 4096, 11008)
    return tables.choose("wgrad", 90, torch.bfloat16, shape, descriptors).how


def test_the_measured_entry_with_the_nearest_rows_comes_first(written) -> None:
    written(entry(1024, "a"), entry(4096, "b"), entry(2048, "other", outs=512))
    assert [choose(rows) for rows in (1, 2048, 3000, 10**6)] == ["a", "a", "b", "b"]


def test_a_measured_entry_that_the_operands_cannot_use_is_passed_over(written) -> None:
    written(entry(1024, "a", tma=True), entry(8192, "b"))
    assert choose(1024) == "a"
    assert choose(1024, descriptors=False) == "b"
    written(entry(1024, "a", tma=True))
    assert choose(1024, descriptors=False) == tables.DEFAULTS["wgrad", 90, 16, False].how


@pytest.mark.parametrize("change", [{"dtype": "float16"}, {"architecture": 100}, {"ins": 11009}])
def test_an_entry_of_another_case_does_not_count(written, change) -> None:
    written(entry(2048, "other", **change))
    assert choose(2048) == tables.DEFAULTS["wgrad", 90, 16, True].how


def test_an_entry_without_tiles_is_passed_over_by_who_needs_them(written) -> None:
    """Where cuBLAS won, tune enters no tiles; a launcher that is called all the same needs some."""
    none = dataclasses.asdict(tables.Config(0, 0, 0, 0, 0, "cuBLAS won", triton=False))
    shape = (2048, 4096, 11008)
    written(entry(2048, "a", config=none))
    assert choose(2048) == "cuBLAS won"
    default = tables.DEFAULTS["wgrad", 90, 16, True]
    assert tables.choose("wgrad", 90, torch.bfloat16, shape, True, need_tiles=True) == default
    written(entry(2048, "a", config=none), entry(8192, "b"))
    assert tables.choose("wgrad", 90, torch.bfloat16, shape, True, need_tiles=True).how == "b"


def test_the_roofline_reads_what_tune_wrote(written, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import roofline

    how = {"how": "fastest of 9 on NVIDIA H200, torch 2.13"}
    none = dataclasses.asdict(tables.Config(0, 0, 0, 0, 0, "", triton=False)) | how
    seconds = {"seconds": 2.0, "cublas_seconds": 2.0}
    written(*(entry(2048, "", kernel=k, config=none) | seconds for k in ("dgrad", "wgrad")))
    found = roofline.measured("H200")
    assert found["dgrad", "bfloat16", 2048, 4096, 11008] == {"measured_s": 2.0, "cublas_s": 2.0}
    assert len(found) == 2 and not roofline.measured("H100")
    for kernel in ("dgrad", "wgrad"):  # where cuBLAS won, the default's tiles are counted
        tile = tables.DEFAULTS[kernel, 90, 16, True]
        work = roofline.product(kernel, "bf16", 2048, 4096, 11008)
        tall = 2048 // tile.rows if kernel == "dgrad" else 4096 // tile.outs
        assert (
            work.programs == tall * 11008 // tile.ins and work.case == f"{kernel}_tma sm_90a bf16"
        )


@pytest.mark.parametrize("kernel", ["dgrad", "wgrad"])
def test_ragged_widths_have_tiles_of_their_own(kernel) -> None:
    def chosen(dtype: torch.dtype, outs: int, ins: int, descriptors: bool) -> tables.Config:
        return tables.choose(kernel, 90, dtype, (2048, outs, ins), descriptors)

    for outs, ins in ((50257, 4096), (4096, 11001), (4096, 4104)):
        assert chosen(torch.float16, outs, ins, False) == tables.RAGGED[kernel]
        assert chosen(torch.float16, outs, ins, True).tma
        assert chosen(torch.float32, outs, ins, False) == tables.DEFAULTS[kernel, 90, 32, False]
    assert chosen(torch.float16, 4096, 4112, False) == tables.DEFAULTS[kernel, 90, 16, False]


@pytest.mark.parametrize("architecture", target.SUPPORTED)
@pytest.mark.parametrize("descriptors", [True, False])
def test_cublas_adds_where_triton_has_fewer_tiles_than_sms(architecture, descriptors) -> None:
    sms = {80: 108, 90: 132, 100: 148}[architecture]

    def chosen(outs: int, ins: int) -> tables.Config:
        shape = (2048, outs, ins)
        return tables.choose("wgrad", architecture, torch.bfloat16, shape, descriptors)

    tile = chosen(10**5, 10**5)
    assert tile.triton
    few, enough = chosen((sms - 1) * tile.outs, tile.ins), chosen(sms * tile.outs, tile.ins)
    assert not few.triton and f"{sms - 1} tiles for {sms} SMs" in few.how
    assert enough == tile and not chosen(1, tile.ins).triton
    assert chosen((sms - 1) * tile.outs + 16, tile.ins) == tile  # part of one more tile
    shape = (2048, 16, 16)
    tiles = tables.choose("wgrad", architecture, torch.float16, shape, descriptors, need_tiles=True)
    assert tiles.rows and tiles.outs and tiles.ins


def test_tune_replaces_the_entry_of_the_same_case_only(tmp_path) -> None:
    path = tmp_path / "measured.json"
    others = [{"rows": 4096}, {"outs": 8192}, {"ins": 1}, {"kernel": "dgrad"}]
    others += [{"architecture": 80}, {"dtype": "float16"}]
    tune.enter(entry(2048, "a"), path)
    for other in others:
        tune.enter(entry(2048, "a") | other, path)
    tune.enter(entry(2048, "b"), path)
    found = json.loads(path.read_text())["entries"]
    assert found == [*(entry(2048, "a") | other for other in others), entry(2048, "b")]
    assert [p.name for p in tmp_path.iterdir()] == ["measured.json"]


def run_tune(monkeypatch, path, measure, *arguments: str) -> int:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "measure", measure)
    monkeypatch.setattr("sys.argv", ["tune", "--json", str(path), *arguments])
    return tune.main()


def test_tune_keeps_what_it_measured_before_a_case_fails(tmp_path, monkeypatch) -> None:
    path = tmp_path / "measured.json"
    tune.enter(entry(1, "before"), path)

    def measure(kernel, shape, dtype):
        if shape[0] == 64:
            raise RuntimeError("out of memory")
        found = entry(shape[0], "new", kernel=kernel, outs=shape[1], ins=shape[2])
        return found | {"seconds": 1.0, "cublas_seconds": 2.0}

    shapes = ["--shapes", "16x32", "--kernels", "dgrad", "--rows", "32", "64", "128"]
    with pytest.raises(RuntimeError, match="dgrad bf16 64 × 16x32: RuntimeError: out of memory"):
        run_tune(monkeypatch, path, measure, *shapes)
    found = json.loads(path.read_text())["entries"]
    assert [(e["rows"], e["config"]["how"]) for e in found] == [(1, "before"), (32, "new")]


def test_tensors_that_descriptors_cannot_address() -> None:
    whole = torch.zeros(8, 16, dtype=torch.bfloat16)
    assert target.can_use_descriptors(whole, whole[::2], whole[:, 8:])
    for other in (whole[:, 1:], whole[:0], whole.t(), torch.zeros(8, 9), whole[:1].expand(8, 16)):
        assert not target.can_use_descriptors(whole, other)


def test_only_devices_with_tables_are_taken(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match="sm_75"):
        target.architecture(torch.device("cuda", 0))
    known = {(8, 6): 80, (8, 9): 80, (9, 0): 90, (10, 3): 100, (12, 0): 80}
    for capability, architecture in known.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert target.architecture(torch.device("cuda", 0)) == architecture


def test_before_sm_80_torch_computes(monkeypatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(target, "has_triton", lambda: True)
    for capability, able in (((7, 0), False), ((7, 5), False), ((8, 0), True), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        on_device = types.SimpleNamespace(device=device, is_cuda=True)
        assert dispatch._by_triton(on_device) == able
        names = dispatch.names(device, torch.bfloat16, SHAPE)
        assert (names["wgrad"] == names["dgrad"] == "torch on cuda") == (not able)
    monkeypatch.setattr(target, "has_triton", lambda: False)
    assert not dispatch._by_triton(on_device)
    assert not target.has_kernels(torch.device("cpu"))


@pytest.mark.parametrize(
    ("version", "new"),
    [("3.2.0", False), ("3.3.1", False), ("3.5.0", False), ("3.6.0", True), ("3.10.1+git", True)],
)
def test_an_old_triton_is_none(monkeypatch, version, new) -> None:
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__=version))
    assert target.has_triton.__wrapped__() == new


def test_no_triton_is_none(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not target.has_triton.__wrapped__()


@pytest.fixture
def asked(monkeypatch):
    """What `choose` is asked on sm_90, where Triton would run."""
    calls = []
    plain = tables.choose

    def choose(kernel, architecture, dtype, shape, descriptors):
        calls.append((kernel, shape, descriptors))
        config = plain(kernel, architecture, dtype, shape, descriptors)
        return dataclasses.replace(config, triton=False)

    monkeypatch.setattr(dispatch.tables, "choose", choose)
    monkeypatch.setattr(dispatch, "has_kernels", lambda device: True)
    monkeypatch.setattr(dispatch, "architecture", lambda device: 90)
    return calls


@pytest.mark.parametrize(("ins", "able"), [(24, True), (20, False)])
def test_the_result_must_be_addressable_too(asked, ins, able) -> None:
    W = torch.zeros(16, 32, dtype=torch.bfloat16)[:, :ins]
    dispatch.dgrad(torch.zeros(5, 16, dtype=torch.bfloat16), W)
    assert target.can_use_descriptors(W) and asked == [("dgrad", (5, 16, ins), able)]


@pytest.mark.parametrize(("outs", "able"), [(16, True), (20, False)])
def test_the_names_are_of_what_dispatch_chooses(asked, outs, able) -> None:
    rows, ins = 6, 32
    dY, X = (torch.zeros(rows, n, dtype=torch.bfloat16) for n in (outs, ins))
    for transposed in (False, True):
        weight = torch.zeros((ins, outs) if transposed else (outs, ins), dtype=torch.bfloat16)
        dispatch.dgrad(dY, weight.t() if transposed else weight)
        dispatch.wgrad_(weight.float(), *((X, dY) if transposed else (dY, X)))
        run = asked[:]
        asked.clear()
        dispatch.names(dY.device, dY.dtype, (rows, outs, ins), transposed)
        assert asked == run
        assert [call[2] for call in asked] == [able and not transposed, able]
        asked.clear()


def test_the_names_say_what_runs_and_how_that_was_found(monkeypatch) -> None:
    on_cpu = dispatch.names(torch.device("cpu"), torch.bfloat16, SHAPE)
    assert on_cpu == {"dgrad": "torch on cpu", "wgrad": "torch on cpu"}
    monkeypatch.setattr(dispatch, "architecture", lambda device: 90)
    monkeypatch.setattr(dispatch, "has_kernels", lambda device: True)
    found = dispatch.names(torch.device("cuda"), torch.bfloat16, SHAPE)
    assert found["dgrad"].startswith("cuBLAS (") and found["wgrad"].startswith("Triton (")
    assert all("not yet run" in name for name in found.values())
    monkeypatch.setattr(dispatch, "has_kernels", lambda device: False)
    assert dispatch.names(torch.device("cuda"), torch.bfloat16, SHAPE)["wgrad"] == "torch on cuda"
