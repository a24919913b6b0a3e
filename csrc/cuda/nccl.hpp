/// NCCL, found and loaded while the program runs, and communicators of two ranks. Not yet run on a
/// GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/functions.hpp"

namespace zb::cuda {

using NcclComm = struct NcclCommTag*;

/// ncclUniqueId: 128 opaque bytes, passed by value.
struct NcclId {
  char reserved[128];
};

/// ncclConfig_t as of 2.17. Later versions take it: they read `size` bytes and fill in what is
/// newer than `version`.
struct NcclConfig {
  size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
  int cga_cluster_size;
  int min_ctas;
  int max_ctas;
  const char* net_name;
};

// X(name, types of the arguments); each returns ncclResult_t, an int to us.
#define ZB_NCCL(X)                                                    \
  X(ncclGetVersion, int*)                                             \
  X(ncclGetUniqueId, NcclId*)                                         \
  X(ncclCommInitRankConfig, NcclComm*, int, NcclId, int, NcclConfig*) \
  X(ncclCommGetAsyncError, NcclComm, int*)                            \
  X(ncclCommFinalize, NcclComm)                                       \
  X(ncclCommDestroy, NcclComm)                                        \
  X(ncclCommAbort, NcclComm)                                          \
  X(ncclGroupStart, void)                                             \
  X(ncclGroupEnd, void)                                               \
  X(ncclSend, const void*, size_t, int, int, NcclComm, Stream)        \
  X(ncclRecv, void*, size_t, int, int, NcclComm, Stream)

// Constants of nccl.h (2.17; the same in 2.27).
constexpr int kNcclSuccess = 0;
constexpr int kNcclInProgress = 7;
constexpr int kNcclUint8 = 1;
constexpr unsigned kNcclConfigMagic = 0xcafebeef;
constexpr unsigned kNcclConfigVersion = 21700;

class Nccl {
 public:
  /// Loads $ZBPIPE_NCCL, else libnccl.so.2, first what is loaded already (torch's). Throws with
  /// what was tried, where it is older than 2.17, and where $NCCL_COMM_BLOCKING makes calls block.
  static std::shared_ptr<const Nccl> load();
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;

#define ZB_MEMBER(name, ...) int (*name)(__VA_ARGS__) = nullptr;
  ZB_NCCL(ZB_MEMBER)
#undef ZB_MEMBER

  /// Throws unless `status` is success or in progress, with the call and NCCL's name for the error.
  void check(int status, const std::string& call) const;
  /// As NCCL writes it: 22703 for 2.27.3.
  int version() const { return version_; }
  const std::string& library() const { return library_; }

 private:
  Nccl() = default;
  void resolve();

  void* handle_ = nullptr;
  std::string library_;
  int version_ = 0;
  const char* (*error_string_)(int) = nullptr;
};

/// One end of a communicator of two ranks that carries messages in one direction: 0 sends to 1. A
/// non-blocking one: what NCCL cannot do at once it does beside us. Calls may come from any thread.
class Communicator {
 public:
  /// `peer` is named in errors. Rank 0 makes the id. Throws where NCCL refuses.
  Communicator(std::shared_ptr<const Nccl> nccl, int peer, int rank, const NcclId& id);
  /// Leaks the communicator unless closed: streams may still use it.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// True when NCCL is through with the last call; throws where the communicator has failed or was
  /// given up.
  bool settled();
  /// Throws where the communicator has failed.
  void watch();
  /// Enqueues `bytes` in `stream`. The first transfer of a communicator sets the connection up, and
  /// is over when `settled`; a later one is enqueued when this returns.
  void send(const char* data, size_t bytes, Stream stream);
  void receive(char* data, size_t bytes, Stream stream);
  /// Gives the communicator back once what was sent has left; aborts it if that takes too long.
  void close();
  /// Ends what these have under way on their device and gives them up; idempotent. Together, since
  /// to give one up may wait for a kernel of another.
  static void abort(const std::vector<Communicator*>& all);

 private:
  NcclComm get() const;
  void check(int status, const char* call) const;
  void after(int status, const char* call);
  bool settled_locked();

  std::shared_ptr<const Nccl> nccl_;
  int peer_, rank_;
  bool used_ = false;  // by the thread that enqueues
  std::mutex mutex_;   // of what follows, and of calls on it
  // A place of its own: NCCL writes it from a thread of its own when a communicator has come up.
  NcclComm* comm_;  // null when given up
};

}  // namespace zb::cuda
