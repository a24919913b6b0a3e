/// The board: one page a rank that every rank of the host sees. It carries the abort word with the
/// first error, and what each rank is doing, so that a rank that dies or stalls can be named.
///
/// Each host has a board of its own, with all ranks of the pipeline on it. What ranks of other
/// hosts do comes in reports over connections (runtime/link.py); times are always of the own host's
/// clock.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "memory.hpp"
#include "sync.hpp"

namespace zb {

/// What an instruction is about; -1 and '-' where it does not apply.
struct Tag {
  int32_t stage = -1;
  int32_t microbatch = -1;
  char kind = '-';
};

/// The first error of a pipeline, as every rank reports it.
struct Failure {
  int32_t rank = -1;
  Tag tag;
  /// 'r'aised, 'd'ied, 's'talled, 'i'nterrupted, 'x' invalid input
  char cause = '-';
  std::string message;
};

class Board {
 public:
  static std::shared_ptr<Board> create(int ranks);
  static std::shared_ptr<Board> open(int pid, int fd, int ranks);

  /// Where other processes find the board, until `seal`.
  int fd() const;
  /// Closes the descriptor, when every rank has the board open.
  void seal() { file_.reset(); }
  int ranks() const { return ranks_; }

  /// Says that `rank` lives in this process and is ready.
  void enter(int rank);
  /// Says that `rank` has ended in order; nobody has to wait for it any more.
  void leave(int rank);
  void begin_step(int rank);
  void end_step(int rank);
  uint32_t steps(int rank) const;
  /// How often what `rank` does has changed; wraps.
  uint32_t changes(int rank) const;
  /// Publishes what the compute lane of `rank` does from now on.
  void running(int rank, const Tag& tag);
  void waiting(int rank);

  /// Tells the thread that enqueues for `rank` that something has changed: it sleeps on the bell.
  void ring(int rank);
  const Word& bell(int rank) const { return entry(rank).bell; }

  /// The first call wins; later ones are dropped, since they are consequences. A forked child's
  /// are dropped too: its errors are none of the pipeline's.
  void abort(const Failure& failure);
  bool aborted() const { return head_->word.load(std::memory_order_acquire) != 0; }
  /// The failure; call only when aborted().
  Failure failure() const;

  /// Sleeps until aborted, at most `ns`. Returns aborted().
  bool watch(int64_t ns) const;

  /// Says that `rank` lives on another host: it is known by reports alone.
  void place_elsewhere(int rank);
  /// What the ranks of this host do and the failure, if any, as bytes for another host's `adopt`;
  /// the same number of bytes every time.
  std::string report() const;
  /// Takes over what a report says of ranks that live elsewhere, and its failure. Throws on what is
  /// no report of a board of as many ranks.
  void adopt(const std::string& report);
  /// The connection to `rank` has ended, and not in order. A rank that lives elsewhere counts as
  /// dead from now on.
  void lose(int rank);
  /// What to add to this host's clock for that of rank 0's host, ns.
  void set_clock(int64_t ns) { head_->clock.store(ns, std::memory_order_relaxed); }
  int64_t clock() const { return head_->clock.load(std::memory_order_relaxed); }

  /// Called now and then on behalf of `rank` while it is in a step: looks for dead ranks and, when
  /// no rank has moved for `timeout_ns`, for the one that stalls. Aborts the board with its name.
  /// Returns aborted().
  bool supervise(int rank, int64_t timeout_ns);

 private:
  enum State : uint32_t { kAbsent, kOutside, kWaiting, kRunning, kLeft };
  enum Loss : uint32_t { kThere, kDead, kCut };
  struct Head {
    Word word;  // 0 healthy, 1 published, 2 + rank while that rank's failure is being written
    int32_t rank;
    Tag tag;
    char cause;
    char message[3072];
    std::atomic<int64_t> clock;
    pthread_mutex_t adopting;  // robust: who holds it may be killed
  };
  struct Entry {
    Word state;
    Word steps;
    std::atomic<int64_t> since;  // when the state last changed
    std::atomic<int64_t> seen;   // when the rank's process was last seen to run
    std::atomic<int32_t> stage, microbatch;
    std::atomic<char> kind;
    std::atomic<int32_t> pid;
    std::atomic<uint64_t> born;  // with the pid, names a process for ever
    Word bell;
    Word changes;                 // counts the states
    std::atomic<bool> elsewhere;  // on another host
    std::atomic<Loss> lost;       // only of ranks elsewhere
    std::atomic<int64_t> heard;   // only of ranks elsewhere: when something last was
  };
  struct Row;
  class Adopting;
  struct Report;

  Board(std::shared_ptr<File> file, int ranks);
  Entry& entry(int rank) const { return entries_[rank]; }
  Tag tag_of(int rank) const;
  void make_lock();
  void adopt(const Row& row);
  void touch(int rank, State state);
  bool gone(int rank) const;
  /// Why a rank that is gone is.
  std::string farewell(int rank, uint32_t step) const;
  bool unheard(int rank, int64_t timeout_ns) const;
  Failure stalled(int rank, int64_t timeout_ns) const;

  std::shared_ptr<File> file_;
  std::unique_ptr<Mapping> map_;
  int ranks_;
  int owner_;  // the process that opened it here
  Head* head_;
  Entry* entries_;
};

}  // namespace zb
