"""The hand-written function table against a CUDA toolkit's headers, where there are any."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"

CHECK = r"""
#include <cuda.h>
#include <cuda_runtime_api.h>
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


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """`compiled(text)`: what the compiler says of a check against the headers, "" if nothing."""
    include = toolkit()
    if include is None:
        pytest.skip("no CUDA toolkit: nvcc and its headers are not here")
    folder = tmp_path_factory.mktemp("headers")

    def run(text: str, csrc: Path = CSRC) -> str:
        source = folder / "check.cpp"
        source.write_text(text)
        command = ["c++", "-std=c++17", "-fsyntax-only", f"-I{csrc}", f"-I{include}", str(source)]
        return subprocess.run(command, capture_output=True, text=True).stderr

    return run


def test_the_function_table_is_that_of_the_headers(compiled):
    assert compiled(CHECK) == ""


def test_a_wrong_prototype_would_be_seen(compiled, tmp_path):
    text = (CSRC / "cuda/functions.hpp").read_text()
    wrong = text.replace("X(cudaFree, void*)", "X(cudaFree, int)")
    assert wrong != text
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda/functions.hpp").write_text(wrong)
    assert "cudaFree differs" in compiled(CHECK, tmp_path)
