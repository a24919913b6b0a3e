/// The functions of the CUDA runtime and driver that zbpipe uses, on the fake device.
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "process.hpp"

using namespace fake;

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kOk = 0, kInvalidValue = 1, kInvalidDevice = 101, kNotReady = 600,
              kAlreadyEnabled = 704;
constexpr uint64_t kDeviceBit = 1ULL << 60;
thread_local int device_now = 0;

struct Handle {
  int pid, fd, buffer;
  uint64_t whole;
  char rest[64 - 3 * sizeof(int) - 4 - sizeof(uint64_t)];
};
static_assert(sizeof(Handle) == 64, "as cudaIpcMemHandle_t");

int devices() {
  const char* text = getenv("ZBPIPE_FAKE_DEVICES");
  return text == nullptr ? 2 : atoi(text);
}

Stream* as_stream(void* stream) { return static_cast<Stream*>(stream); }

std::string hex(const void* pointer) {
  char text[32];
  snprintf(text, sizeof(text), "%p", pointer);
  return text;
}

char* map(int fd, uint64_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) {
    perror("fake CUDA: mmap");
    abort();
  }
  return static_cast<char*>(at);
}

/// File and offset of a mapped address, so that two mappings of one word are one flag.
bool locate(char* address, uint64_t& file, uint64_t& offset) {
  FILE* maps = fopen("/proc/self/maps", "re");
  char line[512];
  bool found = false;
  while (!found && fgets(line, sizeof(line), maps) != nullptr) {
    unsigned long long begin, end, at, inode;
    if (sscanf(line, "%llx-%llx %*s %llx %*s %llu", &begin, &end, &at, &inode) != 4) continue;
    auto want = reinterpret_cast<unsigned long long>(address);
    if (want < begin || want >= end || inode == 0) continue;
    file = inode;
    offset = at + (want - begin);
    found = true;
  }
  fclose(maps);
  return found;
}

}  // namespace

API const char* cudaGetErrorString(int status) {
  return status == kInvalidDevice ? "invalid device" : "an error of the fake";
}
API int cudaRuntimeGetVersion(int* out) { return *out = 13000, kOk; }
API int cudaDriverGetVersion(int* out) { return *out = 13000, kOk; }
API int cudaGetDeviceCount(int* out) { return *out = devices(), kOk; }
API int cudaGetDevice(int* out) { return *out = device_now, kOk; }
API int cudaGetLastError() { return last_error() = 0; }
API int cudaDeviceEnablePeerAccess(int, unsigned) {
  static std::atomic<int> calls{0};
  return calls++ == 0 ? kOk : last_error() = kAlreadyEnabled;
}
API int cudaSetDevice(int device) {
  if (device < 0 || device >= devices()) return kInvalidDevice;
  device_now = device;
  return kOk;
}
API int cudaDeviceGetAttribute(int* out, int attribute, int) { return *out = attribute, kOk; }
API int cudaDeviceGetPCIBusId(char* out, int bytes, int device) {
  snprintf(out, static_cast<size_t>(bytes), "fake:%d", device);
  return kOk;
}
API int cudaDeviceCanAccessPeer(int* out, int, int) { return *out = 1, kOk; }
API int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return kOk;
}

API int cudaStreamCreateWithPriority(void** out, unsigned flags, int priority) {
  if (priority > 0 || priority < -5) return kInvalidValue;
  if (flags != 1) process().universe.report("a stream that waits for the default stream");
  return *out = process().make_stream(device_now), kOk;
}
API int cudaStreamDestroy(void* stream) { return process().destroy(as_stream(stream)), kOk; }

API int cudaStreamQuery(void* stream) {
  Stream* s = as_stream(stream);
  // Before the clock is read: it knows at least what this many operations did.
  if (s->completed.load() != s->enqueued.load()) return last_error() = kNotReady;
  Process& p = process();
  p.universe.lock();
  Clock clock = p.universe.clock(s->actor);
  p.universe.unlock();
  p.seen(clock, true);
  return kOk;
}

API int cudaStreamSynchronize(void* stream) {
  count("cudaStreamSynchronize");
  while (cudaStreamQuery(stream) == kNotReady) usleep(20);
  last_error() = 0;
  return kOk;
}

API int cudaStreamWaitEvent(void* stream, void* event, unsigned) {
  Stream* s = as_stream(stream);
  auto* e = static_cast<Event*>(event);
  std::shared_ptr<Record> record;
  {
    std::lock_guard<std::mutex> guard(e->mutex);
    record = e->record;
  }
  if (s->faulty(kSkipWaitEvent)) return kOk;
  if (!record) {
    process().universe.report("a stream waits for an event that was not recorded: a no-op");
    return kOk;
  }
  Op op;
  op.stream = s;
  op.wait = [record] {
    Process& p = process();
    std::unique_lock<std::mutex> guard(p.mutex);
    p.happened.wait(guard, [&] { return record->done.load(); });
  };
  op.order = [record](Clock& clock) { clock.join(record->clock); };
  process().enqueue(std::move(op));
  return kOk;
}

API int cudaEventCreateWithFlags(void** out, unsigned) { return *out = new Event(), kOk; }
API int cudaEventDestroy(void* event) {
  delete static_cast<Event*>(event);
  return kOk;
}

API int cudaEventRecord(void* event, void* stream) {
  Stream* s = as_stream(stream);
  auto record = std::make_shared<Record>();
  {
    auto* e = static_cast<Event*>(event);
    std::lock_guard<std::mutex> guard(e->mutex);
    e->record = record;
  }
  bool early = s->faulty(kRecordEarly);
  Op op;
  op.stream = s;
  op.order = [s, record, early](Clock& clock) {
    record->clock = early ? s->before_last_work : clock;
  };
  op.effect = [record] {
    record->time = now_ns();
    std::lock_guard<std::mutex> guard(process().mutex);
    record->done = true;
    process().happened.notify_all();
  };
  process().enqueue(std::move(op));
  return kOk;
}

API int cudaEventQuery(void* event) {
  auto* e = static_cast<Event*>(event);
  std::shared_ptr<Record> record;
  {
    std::lock_guard<std::mutex> guard(e->mutex);
    record = e->record;
  }
  if (!record) return kOk;
  if (!record->done.load()) return last_error() = kNotReady;
  process().seen(record->clock, false);
  return kOk;
}

API int cudaEventElapsedTime(float* ms, void* start, void* end) {
  auto* a = static_cast<Event*>(start);
  auto* b = static_cast<Event*>(end);
  if (!a->record || !b->record) return kInvalidValue;
  if (!a->record->done || !b->record->done) return last_error() = kNotReady;
  *ms = static_cast<float>(static_cast<double>(b->record->time - a->record->time) / 1e6);
  return kOk;
}

API int cudaMalloc(void** out, size_t bytes) {
  count("cudaMalloc");
  Process& p = process();
  // An allocation lies somewhere inside a block, and a handle names the block.
  uint64_t pad;
  {
    std::lock_guard<std::mutex> guard(p.mutex);
    pad = 4096 * (1 + static_cast<uint64_t>(p.made++) % 7);
  }
  uint64_t whole = pad + bytes + 4096;
  int fd = memfd_create("fake-device-memory", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(whole)) != 0) return kInvalidValue;
  char* base = map(fd, whole);
  int buffer = p.universe.new_buffer(pad, pad + bytes, whole);
  std::lock_guard<std::mutex> guard(p.mutex);
  p.allocations[base] = {base, whole, fd, buffer, false};
  *out = base + pad;
  return kOk;
}

API int cudaFree(void* data) {
  count("cudaFree");
  if (data == nullptr) return kOk;
  Process& p = process();
  const Allocation* found = p.find(data, 0, "cudaFree of " + hex(data));
  if (found == nullptr || found->imported || found->host) return kInvalidValue;
  int host = p.host();
  p.must_not_be_used(found->buffer, "cudaFree");
  Locked locked(p.universe);
  Buffer& buffer = p.universe.buffer(found->buffer);
  p.universe.must_be_over(p.known, found->buffer, 0, "cudaFree");
  buffer.live = false;
  if (buffer.imports != 0) {
    // Under the lock that `report` would take.
    p.universe.access(host, found->buffer, buffer.begin, buffer.begin, true,
                      "cudaFree, while a process has it open,");
  }
  close(found->fd);
  return kOk;
}

API int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, void* stream) {
  Stream* s = as_stream(stream);
  Op op;
  op.stream = s;
  op.work = true;
  if (bytes > 0) op.uses = {to, from};
  op.effect = [=] {
    process().access(s->actor, from, bytes, false, kCopyRead);
    process().access(s->actor, to, bytes, true, "a copy's write");
    memcpy(to, from, bytes);
  };
  process().enqueue(std::move(op));
  return kOk;
}

API int cudaMemsetAsync(void* to, int value, size_t bytes, void* stream) {
  Stream* s = as_stream(stream);
  Op op;
  op.stream = s;
  op.work = true;
  if (bytes > 0) op.uses = {to};
  op.effect = [=] {
    process().access(s->actor, to, bytes, true, "a memset");
    memset(to, value, bytes);
  };
  process().enqueue(std::move(op));
  return kOk;
}

API int cudaHostRegister(void* data, size_t bytes, unsigned) {
  count("cudaHostRegister");
  auto* base = static_cast<char*>(data);
  Region region{bytes, 0, 0, {base, bytes, -1, -1, false, true}};
  if (!locate(base, region.file, region.offset)) return kInvalidValue;
  Process& p = process();
  region.memory.buffer = p.universe.new_buffer(0, bytes, bytes);
  std::lock_guard<std::mutex> guard(p.mutex);
  return p.regions.emplace(base, region).second ? kOk : kInvalidValue;
}

API int cudaHostUnregister(void* data) {
  count("cudaHostUnregister");
  Process& p = process();
  std::unique_lock<std::mutex> guard(p.mutex);
  auto found = p.regions.find(static_cast<char*>(data));
  if (found == p.regions.end()) return kInvalidValue;
  int buffer = found->second.memory.buffer;
  guard.unlock();
  p.must_not_be_used(buffer, "cudaHostUnregister");
  {
    Locked locked(p.universe);
    p.universe.must_be_over(p.known, buffer, 0, "cudaHostUnregister");
    p.universe.buffer(buffer).live = false;
  }
  guard.lock();
  p.regions.erase(static_cast<char*>(data));
  return kOk;
}

API int cudaHostGetDevicePointer(void** out, void* data, unsigned) {
  *out = reinterpret_cast<void*>(reinterpret_cast<uint64_t>(data) | kDeviceBit);
  return kOk;
}

API int cudaIpcGetMemHandle(Handle* out, void* data) {
  Process& p = process();
  const Allocation* found = p.find(data, 0, "cudaIpcGetMemHandle");
  if (found == nullptr || found->imported || found->host) return kInvalidValue;
  *out = Handle{p.pid, found->fd, found->buffer, found->whole, {}};
  return kOk;
}

API int cudaIpcOpenMemHandle(void** out, Handle handle, unsigned flags) {
  Process& p = process();
  if (handle.pid == p.pid || flags != 1) return kInvalidValue;
  std::string path = "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
  int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return kInvalidValue;
  char* base = map(fd, handle.whole);
  close(fd);
  {
    Locked locked(p.universe);
    ++p.universe.buffer(handle.buffer).imports;
  }
  std::lock_guard<std::mutex> guard(p.mutex);
  p.allocations[base] = {base, handle.whole, -1, handle.buffer, true};
  *out = base;
  return kOk;
}

API int cudaIpcCloseMemHandle(void* data) {
  count("cudaIpcCloseMemHandle");
  Process& p = process();
  const Allocation* found = p.find(data, 0, "cudaIpcCloseMemHandle");
  if (found == nullptr || !found->imported || found->base != data) return kInvalidValue;
  Allocation closed = *found;
  p.must_not_be_used(closed.buffer, "cudaIpcCloseMemHandle");
  {
    Locked locked(p.universe);
    p.universe.must_be_over(p.known, closed.buffer, p.pid, "cudaIpcCloseMemHandle");
    --p.universe.buffer(closed.buffer).imports;
  }
  std::lock_guard<std::mutex> guard(p.mutex);
  p.allocations.erase(closed.base);
  munmap(closed.base, closed.whole);
  return kOk;
}

API int cudaLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  Op op;
  op.stream = as_stream(stream);
  op.effect = [=] { function(data); };
  process().enqueue(std::move(op));
  return kOk;
}

API int cuDeviceGetAttribute(int* out, int, int) { return *out = can_flush(), kOk; }

API int cuMemGetAddressRange_v2(uint64_t* base, size_t* bytes, uint64_t address) {
  Process& p = process();
  const Allocation* found = p.find(reinterpret_cast<void*>(address), 0, "cuMemGetAddressRange");
  if (found == nullptr) return kInvalidValue;
  *base = reinterpret_cast<uint64_t>(found->base);
  *bytes = found->whole;
  return kOk;
}
