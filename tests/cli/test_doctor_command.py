"""`zbpipe doctor`: what it finds with and without a device, and what it says to do."""

from __future__ import annotations

import importlib.metadata
import json
import socket
import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from zbpipe import doctor
from zbpipe.cli import main
from zbpipe.kernels import target

NOWHERE = {"ZBPIPE_CUDART": "/nowhere/libcudart.so"}


def findings(capsys):
    """(exit status, the JSON's findings by name, all of it)"""
    status = main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    return status, {found["name"]: found for found in told["findings"]}, told


def test_without_a_runtime_the_cpu_works_and_the_fix_is_said(capsys, monkeypatch):
    monkeypatch.setenv("ZBPIPE_CUDART", NOWHERE["ZBPIPE_CUDART"])
    status, found, told = findings(capsys)
    assert (status, told["cpu"], told["cuda"]) == (0, True, False)
    assert "/nowhere" in found["CUDA runtime"]["detail"]
    assert "ZBPIPE_CUDART" in found["CUDA runtime"]["fix"]
    assert {name for name, f in found.items() if f["ok"]} >= {"extension", "torch", "transport shm"}
    assert not found["transport ipc"]["ok"]
    shown = [name.split()[1] for name in found if name.startswith("transport ")]
    assert shown == ["local", "shm", "ipc", "tcp", "nccl", "torch"]


def test_a_runtime_that_torch_brought_along_is_pointed_to(capsys, monkeypatch, tmp_path):
    library = tmp_path / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    library.parent.mkdir(parents=True)
    library.touch()
    # A torch for CUDA may have imported a package of that name already.
    package = ModuleType("nvidia")
    package.__spec__ = ModuleSpec("nvidia", None, is_package=True)
    package.__spec__.submodule_search_locations = [str(tmp_path / "nvidia")]
    monkeypatch.setitem(sys.modules, "nvidia", package)
    monkeypatch.setenv("ZBPIPE_CUDART", NOWHERE["ZBPIPE_CUDART"])
    _, found, _ = findings(capsys)
    assert str(library) in found["CUDA runtime"]["fix"]


def test_every_missing_thing_has_a_fix_and_nothing_else_has(capsys, monkeypatch):
    monkeypatch.setenv("ZBPIPE_CUDART", NOWHERE["ZBPIPE_CUDART"])
    _, found, _ = findings(capsys)
    assert all(bool(f["fix"]) != f["ok"] and f["detail"] for f in found.values())
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert all(f["detail"] in text and f["fix"] in text for f in found.values())
    assert text.endswith("CPU: the executor runs here. CUDA: the executor does not run here.\n")


def test_torch_is_not_imported():
    code = (
        "import sys; from zbpipe.cli import main; status = main(['doctor']); "
        "sys.exit(10 if 'torch' in sys.modules else status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_the_extension_it_says_how_to_build_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "zbpipe._native", None)
    monkeypatch.delattr("zbpipe._native", raising=False)
    status, found, told = findings(capsys)
    assert (status, told["cpu"]) == (1, False)
    assert "build_ext --inplace" in found["extension"]["fix"]


DEVICE = {"bus": "0", "capability": (9, 0), "multiprocessors": 132, "copy_engines": 3, "peers": []}
PROBE = {
    "library": "libcudart.so.13",
    "runtime": 13000,
    "driver": 13000,
    "stream_memory_operations": True,
    "devices": [DEVICE | {"peers": [1]}, DEVICE | {"peers": [0]}],
    "error": None,
}


class Native:
    """An extension that finds what a test says."""

    __file__ = "_native.so"

    def __init__(self, probe):
        self.cuda = self
        self.probe = lambda: probe


def named(probe) -> dict[str, doctor.Finding]:
    return {found.name: found for found in doctor._cuda(Native(PROBE | probe))[1]}


def test_two_devices_that_reach_each_other_are_fine():
    found = named({})
    assert [name for name, f in found.items() if not f.ok] == []
    assert "compute capability 9.0, 132 SMs" in found["devices"].detail
    assert "CUDA 13.0" in found["CUDA driver"].detail


@pytest.mark.parametrize(
    ("probe", "name", "detail", "fix"),
    [
        ({"driver": 0}, "CUDA driver", "libcuda.so.1", "--gpus all"),
        ({"driver": 12040}, "CUDA driver", "12.4 only", "libcudart.so.12"),
        ({"stream_memory_operations": False}, "CUDA driver", "cuStreamWaitValue32", "CUDA 12"),
        ({"devices": [], "error": "CUDA error 100"}, "devices", "error 100", "nvidia-smi"),
        ({"devices": [DEVICE, DEVICE]}, "peer access", "0-1", "topo"),
    ],
)
def test_what_is_wrong_with_a_device_is_said(probe, name, detail, fix):
    found = named(probe)[name]
    assert not found.ok
    assert detail in found.detail
    assert fix in found.fix


@pytest.mark.parametrize("given", ["eht0", "lo,eht0"])
def test_an_interface_that_is_not_there_is_told_of(monkeypatch, capsys, given):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    status, found, told = findings(capsys)
    tcp = found["transport tcp"]
    assert (status, told["cpu"], tcp["ok"]) == (0, True, False)
    assert f"GLOO_SOCKET_IFNAME = {given!r}: the network interface eht0 is not th" in tcp["detail"]
    first, _, there = tcp["fix"].partition("unset it, or name one with an address, of ")
    assert first == "gloo needs it, too: "
    assert there.split(", ") == [name for _, name in socket.if_nameindex()]


@pytest.mark.parametrize(("value", "ok"), [(None, True), ("8", True), ("32", True), ("1", False)])
def test_few_hardware_queues_are_told_of(monkeypatch, value, ok):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
    assert doctor._queues().ok is ok


@pytest.mark.parametrize(
    ("version", "ok", "detail"),
    [
        ("3.6.0", True, "triton 3.6.0"),
        ("3.10.1+git", True, "triton 3.10.1+git"),
        ("3.5.1", False, "triton 3.5.1, the kernels want 3.6 or newer"),
        ("2.9", False, "triton 2.9, the kernels want 3.6 or newer"),
        (None, False, "not installed"),
    ],
)
def test_an_old_triton_is_told_of(monkeypatch, version, ok, detail):
    def installed(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    found = doctor._triton()
    assert (found.ok, found.detail) == (ok, detail)
    assert ok or (
        "pip install" in found.fix and ("triton>=3.6" in found.fix) == (version is not None)
    )


def test_the_oldest_triton_is_the_kernels():
    assert doctor._OLDEST_TRITON == target.OLDEST_TRITON
