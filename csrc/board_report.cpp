#include <errno.h>
#include <string.h>
#include <time.h>

#include <algorithm>

#include "board.hpp"

namespace zb {

/// One rank in a report. Times are ages, since hosts have clocks of their own.
struct Board::Row {
  int32_t rank;
  uint32_t state, steps, changes;
  int64_t since, seen;  // ns ago
  int32_t stage, microbatch;
  char kind;
  bool told;  // the reporting host is the rank's own
  bool dead;
};

struct Board::Report {
  int32_t ranks;
  int32_t rank;  // of the failure; -1: there is none
  Tag tag;
  char cause;
  char message[sizeof(Head::message)];
};

void Board::make_lock() {
  pthread_mutexattr_t kind;
  pthread_mutexattr_init(&kind);
  pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
  int rc = pthread_mutex_init(&head_->adopting, &kind);
  pthread_mutexattr_destroy(&kind);
  ZB_CHECK(rc == 0, "a mutex that processes share");
}

/// Holds the lock of those who adopt, where `held`. They need microseconds, unless one was stopped
/// meanwhile: nobody waits for that, since the next report brings the same and more.
class Board::Adopting {
 public:
  explicit Adopting(pthread_mutex_t& mutex) : mutex_(mutex) {
    constexpr int kTries = 500;  // 50 ms, half of the time between two reports
    for (int i = 0; i < kTries; ++i) {
      int rc = pthread_mutex_trylock(&mutex_);
      // Who held it was killed: the row it left half written is as old as its number says, or
      // newer.
      if (rc == EOWNERDEAD) rc = pthread_mutex_consistent(&mutex_);
      held = rc == 0;
      if (held) return;
      timespec t = to_timespec(100'000);
      nanosleep(&t, nullptr);
    }
  }
  ~Adopting() {
    if (held) pthread_mutex_unlock(&mutex_);
  }
  Adopting(const Adopting&) = delete;
  Adopting& operator=(const Adopting&) = delete;

  bool held = false;

 private:
  pthread_mutex_t& mutex_;
};

void Board::place_elsewhere(int rank) {
  ZB_CHECK(rank >= 0 && rank < ranks_, "rank is not on this board");
  entry(rank).heard.store(now_ns());
  entry(rank).elsewhere = true;
}

void Board::lose(int rank) {
  ZB_CHECK(rank >= 0 && rank < ranks_, "rank is not on this board");
  if (!entry(rank).elsewhere) {
    // A process that died is found by `supervise`, if somebody waits for it.
    if (!gone(rank)) abort({rank, Tag{}, 'd', "the connection to this rank broke"});
    return;
  }
  Loss there = kThere;
  entry(rank).lost.compare_exchange_strong(there, kCut);
}

std::string Board::report() const {
  std::string out(sizeof(Report) + ranks_ * sizeof(Row), '\0');
  Report head{};
  head.ranks = ranks_;
  head.rank = -1;
  if (aborted()) {
    Failure f = failure();
    head.rank = f.rank;
    head.tag = f.tag;
    head.cause = f.cause;
    memcpy(head.message, f.message.data(), std::min(f.message.size(), sizeof(head.message) - 1));
  }
  memcpy(out.data(), &head, sizeof(head));
  for (int r = 0; r < ranks_; ++r) {
    const Entry& e = entry(r);
    Row row{};
    row.rank = r;
    row.told = !e.elsewhere;
    // The number of changes first and steps last: what is read in between may be newer, never
    // older.
    row.changes = e.changes.load(std::memory_order_acquire);
    row.state = e.state.load(std::memory_order_acquire);
    row.since = now_ns() - e.since.load(std::memory_order_relaxed);
    row.seen = now_ns() - e.seen.load(std::memory_order_relaxed);
    row.stage = e.stage.load(std::memory_order_relaxed);
    row.microbatch = e.microbatch.load(std::memory_order_relaxed);
    row.kind = e.kind.load(std::memory_order_relaxed);
    row.dead = row.told && row.state != kLeft && gone(r);
    row.steps = steps(r);
    memcpy(out.data() + sizeof(head) + r * sizeof(row), &row, sizeof(row));
  }
  return out;
}

void Board::adopt(const Row& row) {
  Entry& e = entry(row.rank);
  int64_t now = now_ns();
  e.heard.store(now);
  // A rank is heard of over several connections: the older word does not overwrite the newer.
  if (!reached(row.changes, e.changes.load(std::memory_order_acquire))) return;
  if (reached(row.steps, steps(row.rank))) e.steps.store(row.steps, std::memory_order_release);
  e.since.store(now - row.since, std::memory_order_relaxed);
  e.seen.store(now - row.seen, std::memory_order_relaxed);
  e.stage.store(row.stage, std::memory_order_relaxed);
  e.microbatch.store(row.microbatch, std::memory_order_relaxed);
  e.kind.store(row.kind, std::memory_order_relaxed);
  e.state.store(row.state, std::memory_order_release);
  if (row.dead) e.lost.store(kDead);
  e.changes.store(row.changes, std::memory_order_release);
}

void Board::adopt(const std::string& report) {
  ZB_CHECK(report.size() == sizeof(Report) + ranks_ * sizeof(Row), "a report of another board");
  Report head;
  memcpy(&head, report.data(), sizeof(head));
  ZB_CHECK(head.ranks == ranks_, "a report of another board");
  {
    Adopting lock(head_->adopting);
    for (int r = 0; r < ranks_ && lock.held; ++r) {
      Row row;
      memcpy(&row, report.data() + sizeof(head) + r * sizeof(row), sizeof(row));
      row.rank = r;
      if (row.told && entry(r).elsewhere) adopt(row);
    }
  }
  if (head.rank < 0) return;
  head.message[sizeof(head.message) - 1] = 0;
  abort({head.rank, head.tag, head.cause, head.message});
}

}  // namespace zb
