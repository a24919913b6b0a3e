/// One process's share of the fake device: streams, the hardware queues that they share,
/// allocations and registered host memory.
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "universe.hpp"

namespace fake {

constexpr char kCopyRead[] = "a copy's read", kOperation[] = "an operation";

/// What cudaEventRecord left behind.
struct Record {
  std::atomic<bool> done{false};
  int64_t time = 0;
  Clock clock{};
};

struct Event {
  std::mutex mutex;
  std::shared_ptr<Record> record;
};

/// Kinds of faults that a test can plant, by stream.
enum Fault { kSkipWaitValue, kSkipWaitEvent, kRecordEarly, kWriteEarly, kFaults };
/// What threads of the host see in vain.
enum Blind { kSees, kBlindSaw, kBlindTakes };

struct Queue;

struct Stream {
  int actor = -1;
  Queue* queue = nullptr;
  std::atomic<uint64_t> enqueued{0}, completed{0};
  Clock before_last_work{};  // for kRecordEarly and kWriteEarly
  int fault_at[kFaults];     // which call of that kind misbehaves, from 0; -1 none, -2 all
  int seen[kFaults] = {};
  bool faulty(Fault kind);
};

/// One entry of a queue. `wait` may block; `effect` happens after the stream's clock has advanced.
struct Op {
  Stream* stream = nullptr;
  std::shared_ptr<const Clock> host;  // what the enqueueing thread knew
  std::function<void()> wait;
  std::function<void(Clock& clock)> order;  // under the universe's lock
  std::function<void()> effect;
  bool work = false;              // touches memory:
  std::vector<const void*> uses;  // where
};

/// A hardware queue: first in, first out, whatever the streams are.
struct Queue {
  std::mutex mutex;
  std::condition_variable filled;
  std::deque<Op> ops;
  bool stopped = false;
};

struct Allocation {
  char* base;  // of the block
  uint64_t whole;
  int fd;
  int buffer;
  bool imported;
  bool host = false;  // registered memory of the host
};

struct Region {
  uint64_t bytes, file, offset;
  Allocation memory;  // as an allocation, which copies read and write
};

struct Word {
  uint64_t file, offset;
  uint32_t* at;
};

class Process {
 public:
  Process();

  Universe universe;
  pid_t pid = getpid();
  int connections;

  /// Gives threads and memory back; no stream may be in use.
  void shut();
  Stream* make_stream(int device);
  void destroy(Stream* stream);
  void enqueue(Op op);
  /// The thread's actor.
  int host();
  std::shared_ptr<const Clock> host_clock();
  /// A thread's actor is through with everything that it did.
  void thread_ends(int actor);
  /// The thread takes memory that is known to be free.
  void take(int buffer);
  /// The calling thread has seen that what `clock` says is over. It may then let go of memory; but
  /// what it enqueues later comes after that only if `orders`, since what a look at an event finds
  /// is luck, and luck must not hide that an edge is missing.
  void seen(const Clock& clock, bool orders);

  /// The thread holds the buffer again, of which what `clock` says is over.
  void take_over(int buffer, const Clock& clock);
  /// Hands the thread's clock on; what it does next is not in it.
  void tell(const std::function<void(const Clock& clock)>& hand);

  /// The allocation of memory of the device, or of registered memory of the host; reports and
  /// returns null where there is none.
  const Allocation* find(const void* data, uint64_t bytes, const std::string& what);
  /// Reports operations to come that use the buffer.
  void must_not_be_used(int buffer, const std::string& what);
  void access(int actor, const void* data, uint64_t bytes, bool write, const std::string& what);
  /// Copies may read the host's memory: no report of a source that is not the device's.
  std::atomic<bool> host_reads{false};
  std::atomic<int> blind{kSees};
  /// A flag, at the device's address or at the host's; reports where there is none.
  bool word(uint64_t address, Word& out);
  bool host_word(const void* at, Word& out);

  std::mutex mutex;  // of everything below
  std::condition_variable happened;
  std::map<char*, Allocation> allocations;
  std::map<char*, Region> regions;
  std::map<std::string, int> calls;
  std::map<int, int> pending;  // operations to come that use a buffer
  int made = 0;
  Clock known{};  // what some thread of the process has seen to be over; under the universe's lock

 private:
  void run(Queue& queue);
  void perform(Op& op);
  void expect(const std::vector<const void*>& uses, int more);
  const Region* region(const char* at, uint64_t bytes) const;
  int streams_ = 0;
  std::map<int, std::unique_ptr<Queue>> queues_;
};

/// This process's; made anew in a forked child and after `fake_reset`.
Process& process();
void reset();
/// What cudaGetLastError finds in this thread.
int& last_error();
int64_t now_ns();
/// $ZBPIPE_FAKE_FLUSH: the device offers to flush remote writes with a wait, and wants it done.
int can_flush();
void count(const char* call);

}  // namespace fake
