#include "process.hpp"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <cstdlib>

namespace fake {
namespace {

std::mutex current_mutex;
std::atomic<Process*> current{nullptr};
std::atomic<uint64_t> epoch{0};

// What cudaHostGetDevicePointer adds: an address that the host cannot use by mistake.
constexpr uint64_t kDeviceBit = 1ULL << 60;

/// The actor of a host thread; given back when the thread ends.
struct HostActor {
  uint64_t epoch = 0;
  pid_t pid = 0;
  int actor = -1;
  std::shared_ptr<const Clock> snapshot;
  ~HostActor() {
    Process* p = current.load();
    if (actor >= 0 && p != nullptr && p->pid == getpid() && epoch == fake::epoch.load())
      p->thread_ends(actor);
  }
};
thread_local HostActor host_actor;

int env(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text == nullptr || *text == 0 ? otherwise : atoi(text);
}

}  // namespace

int can_flush() { return env("ZBPIPE_FAKE_FLUSH", 0); }

int& last_error() {
  thread_local int error = 0;
  return error;
}

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

Process& process() {
  Process* p = current.load(std::memory_order_acquire);
  if (p != nullptr && p->pid == getpid()) return *p;
  std::lock_guard<std::mutex> guard(current_mutex);
  p = current.load();
  if (p != nullptr && p->pid == getpid()) return *p;
  // In a forked child the old one's threads are missing: it is left alone.
  p = new Process();
  ++epoch;
  current.store(p, std::memory_order_release);
  return *p;
}

void reset() {
  std::lock_guard<std::mutex> guard(current_mutex);
  Process* old = current.load();
  current.store(new Process(), std::memory_order_release);
  ++epoch;
  if (old != nullptr && old->pid == getpid()) old->shut();
}

Process::Process()
    : connections(std::max(1, std::min(32, env("CUDA_DEVICE_MAX_CONNECTIONS", 8)))) {}

void Process::shut() {
  std::lock_guard<std::mutex> guard(mutex);
  for (auto& [_, queue] : queues_) {
    std::lock_guard<std::mutex> inner(queue->mutex);
    queue->stopped = true;
    queue->filled.notify_all();
  }
  for (auto& [base, a] : allocations) {
    munmap(base, a.whole);
    if (!a.imported && universe.buffer(a.buffer).live) close(a.fd);
  }
  // The rest stays: a thread may be about to leave it.
}

void count(const char* call) {
  Process& p = process();
  std::lock_guard<std::mutex> guard(p.mutex);
  ++p.calls[call];
}

bool Stream::faulty(Fault kind) {
  int number = seen[kind]++;
  return fault_at[kind] == -2 || fault_at[kind] == number;
}

Stream* Process::make_stream(int device) {
  auto* stream = new Stream();
  std::fill(stream->fault_at, stream->fault_at + kFaults, -1);
  stream->actor = universe.take_actor();
  std::lock_guard<std::mutex> guard(mutex);
  auto& queue = queues_[device * 32 + streams_++ % connections];
  if (!queue) {
    queue = std::make_unique<Queue>();
    std::thread([this, q = queue.get()] { run(*q); }).detach();
  }
  stream->queue = queue.get();
  return stream;
}

void Process::destroy(Stream* stream) {
  if (stream->completed.load() != stream->enqueued.load())
    universe.report("a stream was destroyed with work in it");
  universe.release_actor(stream->actor);
  // Not deleted: its queue's thread may be about to leave the stream's last operation.
}

int Process::host() {
  if (host_actor.epoch != epoch.load() || host_actor.pid != pid) {
    host_actor.snapshot = nullptr;
    host_actor.actor = universe.take_actor();
    host_actor.pid = pid;
    host_actor.epoch = epoch.load();
  }
  return host_actor.actor;
}

std::shared_ptr<const Clock> Process::host_clock() {
  int actor = host();
  if (!host_actor.snapshot) {
    Locked locked(universe);
    host_actor.snapshot = std::make_shared<Clock>(universe.clock(actor));
  }
  return host_actor.snapshot;
}

void Process::take(int buffer) {
  int actor = host();
  Locked locked(universe);
  universe.take(actor, buffer);
  host_actor.snapshot = nullptr;
}

void Process::seen(const Clock& clock, bool orders) {
  int actor = host();
  Locked locked(universe);
  known.join(clock);
  if (!orders) return;
  universe.clock(actor).join(clock);
  ++universe.clock(actor).at[actor];
  host_actor.snapshot = nullptr;
}

void Process::thread_ends(int actor) {
  {
    Locked locked(universe);
    known.join(universe.clock(actor));
  }
  universe.release_actor(actor);
}

void Process::take_over(int buffer, const Clock& clock) {
  int actor = host();
  Locked locked(universe);
  universe.mark_over(clock, buffer);
  universe.take(actor, buffer);
  host_actor.snapshot = nullptr;
}

void Process::tell(const std::function<void(const Clock& clock)>& hand) {
  int actor = host();
  Locked locked(universe);
  Clock& clock = universe.clock(actor);
  hand(clock);
  known.join(clock);
  ++clock.at[actor];
  host_actor.snapshot = nullptr;
}

void Process::enqueue(Op op) {
  op.host = host_clock();
  expect(op.uses, 1);
  ++op.stream->enqueued;
  Queue& queue = *op.stream->queue;
  std::lock_guard<std::mutex> guard(queue.mutex);
  queue.ops.push_back(std::move(op));
  queue.filled.notify_one();
}

void Process::run(Queue& queue) {
  prctl(PR_SET_NAME, "fake-queue");
  prctl(PR_SET_TIMERSLACK, 1UL);
  int jitter = env("ZBPIPE_FAKE_JITTER", 0);  // most microseconds before an operation
  uint32_t random = static_cast<uint32_t>(env("ZBPIPE_FAKE_SEED", 1)) * 2654435761U + 1;
  while (true) {
    Op op;
    {
      std::unique_lock<std::mutex> guard(queue.mutex);
      queue.filled.wait(guard, [&] { return queue.stopped || !queue.ops.empty(); });
      if (queue.ops.empty()) return;
      op = std::move(queue.ops.front());
      queue.ops.pop_front();
    }
    random = random * 1664525U + 1013904223U;
    if (jitter > 0 && (random >> 28) < 4) usleep((random >> 8) % static_cast<uint32_t>(jitter));
    perform(op);
  }
}

void Process::perform(Op& op) {
  if (op.wait) op.wait();
  {
    Locked locked(universe);
    Clock& clock = universe.clock(op.stream->actor);
    if (op.host) clock.join(*op.host);
    if (op.work) op.stream->before_last_work = clock;
    ++clock.at[op.stream->actor];
    if (op.order) op.order(clock);
  }
  if (op.effect) op.effect();
  expect(op.uses, -1);
  std::lock_guard<std::mutex> guard(mutex);
  ++op.stream->completed;
  happened.notify_all();
}

void Process::expect(const std::vector<const void*>& uses, int more) {
  for (const void* data : uses) {
    const Allocation* found = data == nullptr ? nullptr : find(data, 0, kOperation);
    if (found == nullptr) continue;
    std::lock_guard<std::mutex> guard(mutex);
    pending[found->buffer] += more;
  }
}

void Process::must_not_be_used(int buffer, const std::string& what) {
  std::unique_lock<std::mutex> guard(mutex);
  int to_come = pending[buffer];
  guard.unlock();
  if (to_come > 0)
    universe.report(what + " of buffer " + std::to_string(buffer) + ", which " +
                    std::to_string(to_come) + " operations have yet to use");
}

const Allocation* Process::find(const void* data, uint64_t bytes, const std::string& what) {
  auto* at = const_cast<char*>(static_cast<const char*>(data));
  bytes = std::max<uint64_t>(bytes, 1);  // the end of one mapping is the beginning of the next
  std::lock_guard<std::mutex> guard(mutex);
  auto next = allocations.upper_bound(at);
  if (next != allocations.begin()) {
    const Allocation& found = std::prev(next)->second;
    if (at + bytes <= found.base + found.whole) return &found;
  }
  if (const Region* registered = region(at, bytes)) return &registered->memory;
  if (!host_reads || (what != kCopyRead && what != kOperation))
    universe.report("no device memory: " + what);
  return nullptr;
}

const Region* Process::region(const char* at, uint64_t bytes) const {
  auto next = regions.upper_bound(const_cast<char*>(at));
  if (next == regions.begin()) return nullptr;
  const Region& found = std::prev(next)->second;
  return at + bytes <= found.memory.base + found.bytes ? &found : nullptr;
}

void Process::access(int actor, const void* data, uint64_t bytes, bool write,
                     const std::string& what) {
  if (bytes == 0) return;
  const Allocation* found = find(data, bytes, what);
  if (found == nullptr) return;
  auto begin = static_cast<uint64_t>(static_cast<const char*>(data) - found->base);
  Locked locked(universe);
  universe.access(actor, found->buffer, begin, begin + bytes, write, what);
}

bool Process::word(uint64_t address, Word& out) {
  // The host's address is none of the device's.
  return host_word(
      (address & kDeviceBit) == 0 ? nullptr : reinterpret_cast<void*>(address & ~kDeviceBit), out);
}

bool Process::host_word(const void* data, Word& out) {
  auto* at = const_cast<char*>(static_cast<const char*>(data));
  {
    std::lock_guard<std::mutex> guard(mutex);
    if (const Region* found = region(at, 4)) {
      out = {found->file, found->offset + static_cast<uint64_t>(at - found->memory.base),
             reinterpret_cast<uint32_t*>(at)};
      return true;
    }
  }
  universe.report("a flag lies in no registered host memory");
  return false;
}

}  // namespace fake
