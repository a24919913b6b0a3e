/// The functions of the CUDA runtime and driver that are used, written out by hand, so that neither
/// headers nor a toolkit are needed. tests/cuda compares them with the real headers where those
/// are.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zb::cuda {

using Stream = struct StreamTag*;  // cudaStream_t and CUstream
using Event = struct EventTag*;
using GraphExec = struct GraphExecTag*;
using HostFunction = void (*)(void*);

/// cudaIpcMemHandle_t: 64 opaque bytes, passed by value.
struct IpcHandle {
  char reserved[64];
};

// X(name, types of the arguments); each returns cudaError_t, an int to us.
#define ZB_CUDA_RUNTIME(X)                                    \
  X(cudaRuntimeGetVersion, int*)                              \
  X(cudaDriverGetVersion, int*)                               \
  X(cudaGetDeviceCount, int*)                                 \
  X(cudaGetDevice, int*)                                      \
  X(cudaSetDevice, int)                                       \
  X(cudaDeviceGetAttribute, int*, int, int)                   \
  X(cudaDeviceGetPCIBusId, char*, int, int)                   \
  X(cudaGetLastError, void)                                   \
  X(cudaDeviceCanAccessPeer, int*, int, int)                  \
  X(cudaDeviceEnablePeerAccess, int, unsigned)                \
  X(cudaDeviceGetStreamPriorityRange, int*, int*)             \
  X(cudaStreamCreateWithPriority, Stream*, unsigned, int)     \
  X(cudaStreamDestroy, Stream)                                \
  X(cudaStreamQuery, Stream)                                  \
  X(cudaStreamWaitEvent, Stream, Event, unsigned)             \
  X(cudaEventCreateWithFlags, Event*, unsigned)               \
  X(cudaEventDestroy, Event)                                  \
  X(cudaEventRecord, Event, Stream)                           \
  X(cudaEventQuery, Event)                                    \
  X(cudaEventElapsedTime, float*, Event, Event)               \
  X(cudaMalloc, void**, size_t)                               \
  X(cudaFree, void*)                                          \
  X(cudaMemcpyAsync, void*, const void*, size_t, int, Stream) \
  X(cudaMemsetAsync, void*, int, size_t, Stream)              \
  X(cudaHostRegister, void*, size_t, unsigned)                \
  X(cudaHostUnregister, void*)                                \
  X(cudaHostGetDevicePointer, void**, void*, unsigned)        \
  X(cudaIpcGetMemHandle, IpcHandle*, void*)                   \
  X(cudaIpcOpenMemHandle, void**, IpcHandle, unsigned)        \
  X(cudaIpcCloseMemHandle, void*)                             \
  X(cudaLaunchHostFunc, Stream, HostFunction, void*)          \
  X(cudaGraphLaunch, GraphExec, Stream)

// X(member, exported name, types of the arguments); each returns CUresult. The `_v2` of the stream
// operations needs no kernel-module option, unlike the first form (cuda.h, CUDA 12).
#define ZB_CUDA_DRIVER(X)                                                                  \
  X(cuStreamWaitValue32, "cuStreamWaitValue32_v2", Stream, uint64_t, uint32_t, unsigned)   \
  X(cuStreamWriteValue32, "cuStreamWriteValue32_v2", Stream, uint64_t, uint32_t, unsigned) \
  X(cuMemGetAddressRange, "cuMemGetAddressRange_v2", uint64_t*, size_t*, uint64_t)         \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute", int*, int, int)

// X(member, exported name, types of the arguments). None of them is CUDA's: a library that stands
// in for it and looks for races learns what the host does with registered memory, which it cannot
// see by itself (registered.hpp). Null where the library does not ask for it.
#define ZB_CUDA_TOLD(X)                                      \
  X(host_saw, "zbpipe_host_saw", const void*, uint32_t)      \
  X(host_sets, "zbpipe_host_sets", const void*, uint32_t)    \
  X(host_uses, "zbpipe_host_uses", const void*, size_t, int) \
  X(host_takes, "zbpipe_host_takes", const void*, uint32_t, const void*)

// Constants of driver_types.h and cuda.h (13.0; the same in 12).
constexpr int kSuccess = 0;
constexpr int kNotReady = 600;
constexpr int kPeerAccessAlreadyEnabled = 704;
constexpr unsigned kStreamNonBlocking = 1;
constexpr int kMemcpyDefault = 4;
constexpr unsigned kHostRegisterPortableMapped = 1 | 2;
constexpr unsigned kIpcLazyEnablePeerAccess = 1;
constexpr unsigned kWaitValueGeq = 0;  // of the signed difference: counters may wrap
constexpr unsigned kWaitValueFlush = 1U << 30;
constexpr unsigned kWriteValueDefault = 0;  // after a fence over everything before it
constexpr int kCanFlushRemoteWrites = 98;

}  // namespace zb::cuda
