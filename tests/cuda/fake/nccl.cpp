/// NCCL between two ranks on the fake device. Strict: a send is over only when its receive has
/// begun, one operation at a time may be in progress, and the first one sets the connection up and
/// is in progress until the other end has made its first one too.
#include <fcntl.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <mutex>
#include <set>
#include <vector>

#include "process.hpp"

using namespace fake;

#define API extern "C" __attribute__((visibility("default")))

API int cudaGetDevice(int* out);

namespace {

constexpr int kOk = 0, kInvalidArgument = 4, kInvalidUsage = 5, kInProgress = 7;
constexpr uint64_t kRoom = 64 << 20;  // most bytes of one message

struct Id {
  int pid, fd;
  char rest[120];
};
static_assert(sizeof(Id) == 128, "as ncclUniqueId");

struct Config {
  size_t size;
  unsigned magic, version;
  int blocking;
};

/// What the two ends share; each counter has one writer.
struct Pair {
  std::atomic<uint32_t> joined[2];  // ends that have come
  std::atomic<uint32_t> made[2];    // operations that were called
  std::atomic<uint32_t> receiving;  // receives that have begun
  std::atomic<uint32_t> sent;       // messages whose bytes are there
  uint64_t bytes;
  Clock clock;  // the sender's
  alignas(4096) char data[kRoom];
};

struct Comm {
  Pair* pair;
  int rank, device;
  int fd;                          // of the pair's memory, where it was made; -1
  std::atomic<uint32_t> calls{0};  // operations that were called here
  std::atomic<uint32_t> over{0};   // of these
  std::atomic<uint32_t> begun{0};  // that occupy the device, or did
  std::atomic<bool> aborted{false};
  std::atomic<bool> finalized{false};
  std::atomic<int> error{0};
};

std::atomic<int> planted{0};
std::mutex all_mutex;
std::set<Comm*> all;  // of this process, until given back
thread_local int depth = 0;
thread_local std::vector<Comm*> aborting;  // in this thread's group

constexpr int kAbortMs = 3000;

/// Gives memory back, as NCCL does, and so waits for every transfer on the device.
void wait_for_device(int device) {
  for (int ms = 0; ms < kAbortMs; ++ms, usleep(1000)) {
    std::lock_guard<std::mutex> guard(all_mutex);
    bool rests = true;
    for (Comm* comm : all)
      if (comm->device == device && comm->over != comm->begun) rests = false;
    if (rests) return;
  }
  process().universe.report("ncclCommAbort waits for a transfer of another communicator");
}

Pair* map(const Id& id) {
  std::string path = "/proc/" + std::to_string(id.pid) + "/fd/" + std::to_string(id.fd);
  int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return nullptr;
  void* at = mmap(nullptr, sizeof(Pair), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  close(fd);
  return at == MAP_FAILED ? nullptr : static_cast<Pair*>(at);
}

/// Sleeps until `word` has reached `value`; false once the communicator was aborted here.
bool await(const Comm& comm, std::atomic<uint32_t>& word, uint32_t value) {
  while (true) {
    uint32_t now = word.load(std::memory_order_acquire);
    if (static_cast<int32_t>(now - value) >= 0) return true;
    if (comm.aborted) return false;
    timespec slice{0, 1'000'000};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, now, &slice, nullptr, 0);
  }
}

void publish(std::atomic<uint32_t>& word, uint32_t value) {
  word.store(value, std::memory_order_release);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

int state_of(const Comm& comm) {
  if (planted != 0) return planted;
  const Pair& pair = *comm.pair;
  if (comm.finalized) return comm.over == comm.calls ? kOk : kInProgress;
  if (pair.joined[1 - comm.rank] == 0) return kInProgress;
  return comm.calls == 1 && pair.made[1 - comm.rank] == 0 ? kInProgress : kOk;
}

/// What a call may be made on; reports what NCCL does not allow.
bool usable(const Comm& comm, uint64_t bytes, int type, int peer) {
  if (comm.aborted || comm.finalized) {
    process().universe.report("a transfer by a communicator that was given back");
    return false;
  }
  if (state_of(comm) == kInProgress) {
    process().universe.report("a transfer by a communicator that is in progress");
    return false;
  }
  return type == 1 && peer == 1 - comm.rank && bytes <= kRoom;
}

int called(Comm& comm) {
  comm.pair->made[comm.rank] = ++comm.calls;
  return state_of(comm);
}

int give_back(Comm& comm) {
  comm.aborted = true;  // not deleted: a stream's thread may be about to leave its last operation
  if (comm.fd >= 0) close(comm.fd);
  comm.fd = -1;
  std::lock_guard<std::mutex> guard(all_mutex);
  all.erase(&comm);
  return kOk;
}

}  // namespace

API const char* ncclGetErrorString(int status) {
  return status == 6 ? "remote process exited or there was a network error" : "a NCCL error";
}
API int ncclGetVersion(int* out) {
  const char* text = getenv("ZBPIPE_FAKE_NCCL_VERSION");
  return *out = text == nullptr ? 22703 : atoi(text), kOk;
}

API int ncclGetUniqueId(Id* out) {
  count("ncclGetUniqueId");
  int fd = memfd_create("fake-nccl", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, sizeof(Pair)) != 0) return kInvalidUsage;
  memset(out, 0, sizeof(*out));
  out->pid = getpid();
  out->fd = fd;
  return kOk;
}

API int ncclCommInitRankConfig(void** out, int ranks, Id id, int rank, const Config* config) {
  count("ncclCommInitRankConfig");
  if (config->magic != 0xcafebeef || config->blocking != 0 || config->version < 21700 ||
      config->size < sizeof(Config) || ranks != 2 || rank < 0 || rank > 1)
    return kInvalidArgument;
  int device = 0;
  cudaGetDevice(&device);
  Pair* pair = map(id);
  if (pair == nullptr) return kInvalidUsage;
  auto* comm = new Comm{pair, rank, device, id.pid == getpid() && rank == 0 ? id.fd : -1};
  {
    std::lock_guard<std::mutex> guard(all_mutex);
    all.insert(comm);
  }
  pair->joined[rank] = 1;
  *out = comm;
  return state_of(*comm);
}

API int ncclCommGetAsyncError(void* comm, int* out) {
  *out = state_of(*static_cast<Comm*>(comm));
  return kOk;
}

API int ncclSend(const void* data, size_t bytes, int type, int peer, void* comm, void* stream) {
  auto& c = *static_cast<Comm*>(comm);
  if (!usable(c, bytes, type, peer) || c.rank != 0) return kInvalidUsage;
  uint32_t number = c.calls.load() + 1;
  auto gone = std::make_shared<bool>(false);
  Op op;
  op.stream = static_cast<Stream*>(stream);
  op.work = true;
  op.uses = {data};
  op.wait = [&c, number, gone] {
    ++c.begun;
    *gone = !await(c, c.pair->receiving, number);
  };
  op.order = [&c, gone](Clock& clock) {
    if (!*gone) c.pair->clock = clock;
  };
  op.effect = [&c, number, gone, data, bytes, actor = op.stream->actor] {
    if (!*gone) {
      process().access(actor, data, bytes, false, kCopyRead);
      memcpy(c.pair->data, data, bytes);
      c.pair->bytes = bytes;
      publish(c.pair->sent, number);
    }
    ++c.over;
  };
  process().enqueue(std::move(op));
  return called(c);
}

API int ncclRecv(void* data, size_t bytes, int type, int peer, void* comm, void* stream) {
  auto& c = *static_cast<Comm*>(comm);
  if (!usable(c, bytes, type, peer) || c.rank != 1) return kInvalidUsage;
  uint32_t number = c.calls.load() + 1;
  auto gone = std::make_shared<bool>(false);
  Op op;
  op.stream = static_cast<Stream*>(stream);
  op.work = true;
  op.uses = {data};
  op.wait = [&c, number, gone] {
    ++c.begun;
    publish(c.pair->receiving, number);
    *gone = !await(c, c.pair->sent, number);
  };
  op.order = [&c, gone](Clock& clock) {
    if (!*gone) clock.join(c.pair->clock);
  };
  op.effect = [&c, gone, data, bytes, actor = op.stream->actor] {
    if (!*gone) {
      if (c.pair->bytes != bytes)
        process().universe.report("a NCCL receive of " + std::to_string(bytes) + " bytes meets " +
                                  std::to_string(c.pair->bytes));
      process().access(actor, data, bytes, true, "a NCCL receive's write");
      memcpy(data, c.pair->data, bytes);
    }
    ++c.over;
  };
  process().enqueue(std::move(op));
  return called(c);
}

API int ncclCommFinalize(void* comm) {
  static_cast<Comm*>(comm)->finalized = true;
  return state_of(*static_cast<Comm*>(comm));
}

API int ncclCommDestroy(void* comm) {
  auto& c = *static_cast<Comm*>(comm);
  count("ncclCommDestroy");
  if (!c.finalized || c.over != c.calls)
    process().universe.report("ncclCommDestroy of a communicator that has work");
  return give_back(c);
}

API int ncclGroupStart() { return ++depth, kOk; }
API int ncclGroupEnd() {
  if (--depth > 0) return kOk;
  for (Comm* comm : aborting) wait_for_device(comm->device);
  for (Comm* comm : aborting) give_back(*comm);
  aborting.clear();
  return kOk;
}

API int ncclCommAbort(void* comm) {
  count("ncclCommAbort");
  auto* c = static_cast<Comm*>(comm);
  c->aborted = true;
  ncclGroupStart();
  aborting.push_back(c);
  return ncclGroupEnd();
}

/// From now on every communicator of this process has failed with `status`; 0: has not.
API void fake_nccl_error(int status) { planted = status; }
