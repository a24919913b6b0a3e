#include <string.h>

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

void Board::adopt(const std::string& report) {
  ZB_CHECK(report.size() == sizeof(Report) + ranks_ * sizeof(Row), "a report of another board");
  Report head;
  memcpy(&head, report.data(), sizeof(head));
  ZB_CHECK(head.ranks == ranks_, "a report of another board");
  for (int r = 0; r < ranks_; ++r) {
    Row row;
    memcpy(&row, report.data() + sizeof(head) + r * sizeof(row), sizeof(row));
    Entry& e = entry(r);
    if (!row.told || !e.elsewhere) continue;
    int64_t now = now_ns();
    e.heard.store(now);
    // A rank is heard of over several connections: the older word does not overwrite the newer.
    if (!reached(row.changes, e.changes.load(std::memory_order_acquire))) continue;
    e.changes.store(row.changes, std::memory_order_relaxed);
    if (reached(row.steps, steps(r))) e.steps.store(row.steps, std::memory_order_release);
    e.since.store(now - row.since, std::memory_order_relaxed);
    e.seen.store(now - row.seen, std::memory_order_relaxed);
    e.stage.store(row.stage, std::memory_order_relaxed);
    e.microbatch.store(row.microbatch, std::memory_order_relaxed);
    e.kind.store(row.kind, std::memory_order_relaxed);
    e.state.store(row.state, std::memory_order_release);
    if (row.dead) e.lost.store(kDead);
  }
  if (head.rank < 0) return;
  head.message[sizeof(head.message) - 1] = 0;
  abort({head.rank, head.tag, head.cause, head.message});
}

}  // namespace zb
