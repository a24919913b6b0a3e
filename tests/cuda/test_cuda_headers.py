"""The hand-written function tables against the headers of CUDA and NCCL, where there are any."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"

COMPARE = r"""
#include <type_traits>
#include "cuda/functions.hpp"

// Two types that a call passes the same way: both pointers, or both integers or both plain structs,
// of the same size.
template <class A, class B>
constexpr bool same = sizeof(A) == sizeof(B) &&
    std::is_pointer_v<A> == std::is_pointer_v<B> && std::is_class_v<A> == std::is_class_v<B> &&
    (std::is_integral_v<A> || std::is_enum_v<A>) == (std::is_integral_v<B> || std::is_enum_v<B>);

template <class Real, class... Ours>
struct Compare : std::false_type {};
template <class R, class... Real, class... Ours>
struct Compare<R(Real...), Ours...> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(Real) != sizeof...(Ours)) return false;
    else return same<R, int> && (same<Real, Ours> && ...);
  }();
};

template <class R>
struct Compare<R(), void> {
  static constexpr bool value = same<R, int>;
};

using namespace zb::cuda;
"""

CHECK = (
    "#include <cuda.h>\n#include <cuda_runtime_api.h>\n"
    + COMPARE
    + r"""
#define CHECK(name, ...) \
  static_assert(Compare<decltype(::name), __VA_ARGS__>::value, #name " differs");
ZB_CUDA_RUNTIME(CHECK)
#undef CHECK
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
constexpr bool equal(const char* a, const char* b) {
  return *a == *b && (*a == 0 || equal(a + 1, b + 1));
}
#define CHECK(name, symbol, ...)                                                       \
  static_assert(Compare<decltype(::name), __VA_ARGS__>::value, #name " differs");      \
  static_assert(equal(TEXT(name), symbol), "the headers' name of " symbol " differs");
ZB_CUDA_DRIVER(CHECK)

static_assert(kSuccess == cudaSuccess && kNotReady == cudaErrorNotReady);
static_assert(kStreamNonBlocking == cudaStreamNonBlocking && kMemcpyDefault == cudaMemcpyDefault);
static_assert(kHostRegisterPortableMapped == (cudaHostRegisterPortable | cudaHostRegisterMapped));
static_assert(kIpcLazyEnablePeerAccess == cudaIpcMemLazyEnablePeerAccess);
static_assert(kWaitValueGeq == CU_STREAM_WAIT_VALUE_GEQ);
static_assert(kWaitValueFlush == CU_STREAM_WAIT_VALUE_FLUSH);
static_assert(kWriteValueDefault == CU_STREAM_WRITE_VALUE_DEFAULT);
static_assert(kCanFlushRemoteWrites == CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES);
static_assert(sizeof(IpcHandle) == sizeof(cudaIpcMemHandle_t));
"""
)

NCCL_CHECK = (
    "#include <cstddef>\n#include <nccl.h>\n"
    + COMPARE.replace("cuda/functions.hpp", "cuda/nccl.hpp")
    + r"""
#define CHECK(name, ...) \
  static_assert(Compare<decltype(::name), __VA_ARGS__>::value, #name " differs");
ZB_NCCL(CHECK)
static_assert(kNcclSuccess == ncclSuccess && kNcclInProgress == ncclInProgress);
static_assert(kNcclUint8 == ncclUint8 && sizeof(NcclId) == sizeof(ncclUniqueId));
constexpr ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
static_assert(kNcclConfigMagic == config.magic);
#define CHECK_FIELD(ours, theirs) \
  static_assert(offsetof(NcclConfig, ours) == offsetof(ncclConfig_t, theirs));
CHECK_FIELD(size, size)
CHECK_FIELD(magic, magic)
CHECK_FIELD(version, version)
CHECK_FIELD(blocking, blocking)
CHECK_FIELD(cga_cluster_size, cgaClusterSize)
CHECK_FIELD(min_ctas, minCTAs)
CHECK_FIELD(max_ctas, maxCTAs)
CHECK_FIELD(net_name, netName)
"""
)


def toolkit() -> Path | None:
    """The folder of the headers of the nvcc on PATH, which may be a wrapper script."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    said = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True).stderr
    top = re.search(r"TOP=(\S+)", said)
    roots = [Path(top[1])] if top else []
    roots.append(Path(nvcc).resolve().parents[1])
    for root in roots:
        for folder in (root / "include", root / "targets/x86_64-linux/include"):
            if (folder / "cuda_runtime_api.h").is_file() and (folder / "cuda.h").is_file():
                return folder
    return None


def nccl() -> Path | None:
    """The folder of nccl.h: $NCCL_INCLUDE, pip's package, or the system's."""
    package = importlib.util.find_spec("nvidia")
    inside = [] if package is None else [Path(p) for p in package.submodule_search_locations or ()]
    given = os.environ.get("NCCL_INCLUDE")
    folders = (
        [Path(given)] if given else [*(p / "nccl/include" for p in inside), Path("/usr/include")]
    )
    return next((folder for folder in folders if (folder / "nccl.h").is_file()), None)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """`compiled(text)`: what the compiler says of a check against the headers, "" if nothing."""
    include = toolkit()
    if include is None:
        pytest.skip("no CUDA toolkit: nvcc and its headers are not here")
    folder = tmp_path_factory.mktemp("headers")

    def run(text: str, csrc: Path = CSRC, more: Path = CSRC) -> str:
        source = folder / "check.cpp"
        source.write_text(text)
        folders = [f"-I{where}" for where in (csrc, include, more)]
        command = ["c++", "-std=c++17", "-fsyntax-only", *folders, str(source)]
        return subprocess.run(command, capture_output=True, text=True).stderr

    return run


def test_the_table_of_nccl_is_that_of_its_header(compiled):
    folder = nccl()
    if folder is None:
        pytest.skip("nccl.h is not here; NCCL_INCLUDE may name its folder")
    assert compiled(NCCL_CHECK, more=folder) == ""


def test_the_function_table_is_that_of_the_headers(compiled):
    assert compiled(CHECK) == ""


def test_a_wrong_prototype_would_be_seen(compiled, tmp_path):
    text = (CSRC / "cuda/functions.hpp").read_text()
    wrong = text.replace("X(cudaFree, void*)", "X(cudaFree, int)")
    assert wrong != text
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda/functions.hpp").write_text(wrong)
    assert "cudaFree differs" in compiled(CHECK, tmp_path)
