/// Vector clocks in memory that all processes of a test share: what is ordered before what, and
/// every access to device memory that is not ordered after the ones it conflicts with.
///
/// Actors are streams and host threads. Only what CUDA promises makes an edge: a stream's order, an
/// event that is waited for, a flag that is waited for (to the write of just that value, however
/// far the flag has got by luck), a query that says "done". So a missing edge is found whatever the
/// timing.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <string>

namespace fake {

constexpr int kActors = 160;
constexpr int kBuffers = 4096, kLog = 160;
constexpr int kFlags = 4096, kHistory = 16;
constexpr int kReports = 64, kReportBytes = 256;

struct Clock {
  uint32_t at[kActors];
  void join(const Clock& other);
};

struct Access {
  uint64_t begin, end;
  uint32_t actor, time;
  bool write;
  // Set when the host knew that it was over and gave the memory to somebody else: what is enqueued
  // after that comes after the access too, but nothing that was enqueued before.
  bool over;
  int32_t host;
  uint32_t host_time;
  char what[38];
};

/// An allocation. `begin` to `end`: what was asked for, in a block of `whole` bytes.
struct Buffer {
  bool used, live;
  uint64_t begin, end, whole;
  int imports;  // processes that have it open
  int home;     // the actor whose stream may use it after it was let go of, + 1; 0 while it is held
  uint32_t logged;
  Access log[kLog];
};

struct Flag {
  uint64_t file, offset;  // of the word
  struct {
    bool written;
    uint32_t value;
    Clock clock;
  } history[kHistory];
};

struct Shared {
  uint32_t initialised;
  pthread_mutex_t mutex;
  bool taken[kActors];
  int owner[kActors];  // pid
  Clock clocks[kActors];
  uint32_t reported;
  char reports[kReports][kReportBytes];
  Buffer buffers[kBuffers];
  Flag flags[kFlags];
};

/// The shared state, mapped from the file $ZBPIPE_FAKE_CUDA, or private where that is not set.
class Universe {
 public:
  Universe();
  ~Universe();
  Universe(const Universe&) = delete;

  int take_actor();
  void release_actor(int actor);
  void report(const std::string& text);
  std::string reports();

  int new_buffer(uint64_t begin, uint64_t end, uint64_t whole);
  Buffer& buffer(int index) { return shared_->buffers[index]; }
  /// `actor` reads or writes; the lock is held.
  void access(int actor, int buffer, uint64_t begin, uint64_t end, bool write,
              const std::string& what);
  /// Reports accesses to the buffer, of `pid` or of anyone (0), that are not known to be over.
  void must_be_over(const Clock& known, int buffer, int pid, const std::string& what);
  /// The host lets go of the buffer: what other streams than `home` did must be known to be over.
  void let_go(const Clock& known, int buffer, int home);
  /// The host knows that what `known` says is over.
  void mark_over(const Clock& known, int buffer);
  /// The host, as `actor`, holds the buffer again.
  void take(int actor, int buffer);
  Flag& flag(uint64_t file, uint64_t offset);
  Clock& clock(int actor) { return shared_->clocks[actor]; }

  void lock();
  void unlock();

 private:
  void report_locked(const std::string& text);
  Shared* shared_;
};

class Locked {
 public:
  explicit Locked(Universe& universe) : universe_(universe) { universe_.lock(); }
  ~Locked() { universe_.unlock(); }

 private:
  Universe& universe_;
};

}  // namespace fake
