"""What this machine and installation can do, and how to mend what is missing. Without torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import ipaddress
import os
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError

# As kernels.target.OLDEST_TRITON, which cannot be imported without torch.
_OLDEST_TRITON = (3, 6)
# What the CPU path needs; the rest is for CUDA.
_REQUIRED = ("extension", "torch", "transport shm")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `fix` says what to do where `ok` is false, else it is empty."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Report:
    """Everything that was found."""

    findings: tuple[Finding, ...]

    @property
    def cpu(self) -> bool:
        """True when pipelines run on the CPU here."""
        return all(found.ok for found in self.findings if found.name in _REQUIRED)

    @property
    def cuda(self) -> bool:
        """True when Programs can run on a CUDA device here."""
        return any(found.name == "transport ipc" and found.ok for found in self.findings)

    def as_json(self) -> dict[str, Any]:
        return {"cpu": self.cpu, "cuda": self.cuda, "findings": [asdict(f) for f in self.findings]}


def examine() -> Report:
    """Look at everything; never raises for what is missing, and takes well under a second."""
    native, extension = _extension()
    probe, cuda = _cuda(native)
    loads, nccl = _nccl(native)
    rest = (_triton(), _queues(), *_transports(probe, loads))
    return Report((extension, _torch(), *cuda, nccl, *rest))


def _extension() -> tuple[Any, Finding]:
    try:
        from . import _native
    except ImportError as error:
        return None, Finding(
            "extension",
            False,
            f"zbpipe._native does not load: {error}",
            "build it with `pip install --no-build-isolation -e .`, or with `python setup.py "
            "build_ext --inplace`; it needs a C++17 compiler, pybind11 and ninja, no CUDA toolkit",
        )
    return _native, Finding("extension", True, f"{_native.__file__}, {platform.machine()}")


def _torch() -> Finding:
    """torch's version and the CUDA it was built for, read from its files."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return Finding("torch", False, "not installed", "pip install torch")
    text = (Path(spec.origin).parent / "version.py").read_text()
    version = re.search(r"__version__ = '([^']*)'", text)
    built = re.search(r"cuda[^=\n]*= '([^']*)'", text)
    what = f"for CUDA {built[1]}" if built else "for the CPU only"
    return Finding("torch", True, f"{version[1] if version else 'unknown version'}, built {what}")


def _cuda(native: Any) -> tuple[dict[str, Any] | None, list[Finding]]:
    """Driver, runtime, devices and the ways between them."""
    if native is None:
        return None, [
            Finding("CUDA", False, "not looked at: the extension is missing", "see there")
        ]
    try:
        probe: dict[str, Any] = native.cuda.probe()
    except RuntimeError as error:
        bundled = _bundled()
        fix = (
            f"import torch first, which loads {bundled}, or set ZBPIPE_CUDART to that"
            if bundled
            else "pip install nvidia-cuda-runtime (CUDA 13) or nvidia-cuda-runtime-cu12, and set "
            "ZBPIPE_CUDART to its libcudart.so; only CUDA devices need it"
        )
        return None, [Finding("CUDA runtime", False, str(error), fix)]
    found = [
        Finding("CUDA runtime", True, f"{_version(probe['runtime'])}, {probe['library']}"),
        _driver(probe),
        *_devices(probe),
    ]
    return probe, found


def _bundled() -> Path | None:
    """The CUDA runtime among the packages that torch for CUDA brings along."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else spec.submodule_search_locations or []
    found = sorted(p for f in folders for p in Path(f).glob("*/lib/libcudart.so.1[23]"))
    return found[-1] if found else None


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _driver(probe: dict[str, Any]) -> Finding:
    name = "CUDA driver"
    if probe["driver"] == 0:
        return Finding(
            name,
            False,
            "no driver: libcuda.so.1 is not there",
            "install the NVIDIA driver; in a container, start it with the devices (--gpus all)",
        )
    detail = f"supports CUDA {_version(probe['driver'])}"
    if probe["driver"] // 1000 < probe["runtime"] // 1000:
        older = f"ZBPIPE_CUDART to a libcudart.so.{probe['driver'] // 1000}"
        return Finding(name, False, f"{detail} only", f"install a newer driver, or point {older}")
    if not probe["stream_memory_operations"]:
        return Finding(
            name,
            False,
            f"{detail}, without cuStreamWaitValue32_v2",
            "install a driver of CUDA 12 or newer: streams order ranks by it",
        )
    return Finding(name, True, detail)


def _devices(probe: dict[str, Any]) -> list[Finding]:
    devices = probe["devices"]
    if not devices:
        why = probe["error"] or "no CUDA device"
        return [Finding("devices", False, why, "check nvidia-smi and CUDA_VISIBLE_DEVICES")]
    lines = [
        f"{i}: {d['bus']}, compute capability {d['capability'][0]}.{d['capability'][1]}, "
        f"{d['multiprocessors']} SMs, {d['copy_engines']} copy engines"
        for i, d in enumerate(devices)
    ]
    apart = [
        f"{a}-{b}"
        for a in range(len(devices))
        for b in range(a + 1, len(devices))
        if b not in devices[a]["peers"]
    ]
    peers = Finding(
        "peer access", True, "between all devices" if len(devices) > 1 else "one device"
    )
    if apart:
        peers = Finding(
            "peer access",
            False,
            f"none between devices {', '.join(apart)}: their copies go through the host",
            "check the topology (nvidia-smi topo -m), IOMMU and ACS settings; slower, not wrong",
        )
    return [Finding("devices", True, "; ".join(lines)), peers]


def _installed(*names: str) -> str | None:
    """The first of the distributions that is installed, with its version."""
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _nccl(native: Any) -> tuple[bool, Finding]:
    """NCCL as ranks on CUDA load it. What pip installed lies where only torch's loader looks."""
    installed = _installed("nvidia-nccl-cu13", "nvidia-nccl-cu12")
    use = "between hosts on CUDA, and for torch.distributed"
    if native is not None:
        try:
            found = native.cuda.probe_nccl()
        except RuntimeError as error:
            if installed is None:
                return False, Finding("NCCL", False, f"used {use}", str(error))
        else:
            number = found["version"]
            version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
            return True, Finding("NCCL", True, f"{version}, {found['library']}; {use}")
    if installed is not None:
        return True, Finding("NCCL", True, f"{installed}, loaded with torch; {use}")
    return False, Finding("NCCL", False, f"used {use}", "it comes with a torch built for CUDA")


def _triton() -> Finding:
    found = _installed("triton")
    needs = "; only zbpipe.kernels needs it, without it torch computes the same"
    if found is None:
        fix = f"pip install triton (the extra [cuda]){needs}"
        return Finding("Triton", False, "not installed", fix)
    oldest = ".".join(map(str, _OLDEST_TRITON))
    if tuple(int(n) for n in re.findall(r"\d+", found)[:2]) < _OLDEST_TRITON:
        fix = f"pip install 'triton>={oldest}'{needs}"
        return Finding("Triton", False, f"{found}, the kernels want {oldest} or newer", fix)
    return Finding("Triton", True, found)


def _queues() -> Finding:
    """Streams share hardware queues where there are fewer of them."""
    name, given = "hardware queues", os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if given is None:
        return Finding(name, True, "CUDA_DEVICE_MAX_CONNECTIONS is not set: CUDA's default, 8")
    detail = f"CUDA_DEVICE_MAX_CONNECTIONS={given}"
    if given.isdigit() and int(given) >= 8:
        return Finding(name, True, detail)
    return Finding(
        name,
        False,
        f"{detail}: streams of a rank share queues, so that a transfer that waits may hold up work",
        "unset it, or set it to 8 to 32; slower, not wrong",
    )


def _transports(probe: dict[str, Any] | None, nccl: bool) -> list[Finding]:
    shm = Finding("transport shm", True, "between processes of this host, on the CPU (memfd)")
    try:
        fd = os.memfd_create("zbpipe-doctor", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        fix = "run on Linux, in a sandbox that allows memfd_create"
        shm = Finding("transport shm", False, f"no shared memory: {error}", fix)
    else:
        reachable = Path(f"/proc/{os.getpid()}/fd/{fd}").exists()
        os.close(fd)
        if not reachable:
            shm = Finding(
                "transport shm", False, "/proc is not mounted", "mount /proc: ranks meet there"
            )
    ready = probe is not None and bool(probe["devices"]) and probe["stream_memory_operations"]
    ipc = (
        Finding("transport ipc", True, "between processes of this host, on CUDA")
        if ready
        else Finding("transport ipc", False, "needs CUDA devices", "see the CUDA lines above")
    )
    local = Finding("transport local", True, "between ranks of one process")
    return [local, shm, ipc, _tcp(), _across(ready, nccl), _by_torch()]


def _across(ready: bool, nccl: bool) -> Finding:
    name, what = "transport nccl", "between hosts, on CUDA"
    if ready and nccl:
        return Finding(name, True, f"{what}; what is not a payload goes by tcp")
    if ready:
        instead = "payloads go by tcp, through the host's memory, which is slower"
        return Finding(name, False, f"{what}: NCCL is missing; {instead}", "see the lines above")
    return Finding(name, False, f"{what}: needs CUDA devices and NCCL", "see the lines above")


def _by_torch() -> Finding:
    name = "transport torch"
    if importlib.util.find_spec("torch") is None:
        return Finding(name, False, "needs torch", "see the line of torch above")
    return Finding(name, True, 'by the job\'s own backend, for wrap(transport="torch")')


def _tcp() -> Finding:
    """Where another host would look for this one, and how ranks tell hosts apart."""
    from .runtime import hosts, wire

    name = "transport tcp"
    try:
        wire.named_addresses()
    except ConfigError as error:
        detail, _, want = str(error).partition("; ")
        fix = f"gloo needs it, too: unset it, or name {want.removeprefix('want ')}"
        return Finding(name, False, detail, fix)
    others = [address for address in wire.local_addresses() if not _loopback(address)]
    if not others:
        return Finding(
            name,
            False,
            "this host has no address but the loopback's, as far as its name says",
            "between hosts only: set GLOO_SOCKET_IFNAME to the network interface to use",
        )
    given = os.environ.get("ZBPIPE_HOST", "")
    which = f"ZBPIPE_HOST={given}" if given else f"found out ({hosts.host_id().split(':')[0]})"
    uses = "between hosts, on the CPU and, where NCCL is missing, on CUDA"
    return Finding(name, True, f"{uses}, at {', '.join(others)}; this host's name: {which}")


def _loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback
