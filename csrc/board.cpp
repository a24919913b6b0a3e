#include "board.hpp"

#include <poll.h>
#include <string.h>

#include <algorithm>
#include <new>

namespace zb {
namespace {

/// True when the process has ended, also while it is a zombie nobody has reaped.
bool process_ended(int pid) {
  int fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (fd < 0) return errno == ESRCH;
  pollfd p{fd, POLLIN, 0};
  bool ended = poll(&p, 1, 0) == 1;
  close(fd);
  return ended;
}

}  // namespace

Board::Board(std::shared_ptr<File> file, int ranks) : file_(std::move(file)), ranks_(ranks) {
  ZB_CHECK(ranks >= 1, "a board needs at least one rank");
  size_t bytes = round_up(sizeof(Head), kPage) + round_up(ranks * sizeof(Entry), kPage);
  file_->grow(bytes);
  map_ = std::make_unique<Mapping>(file_, 0, bytes);
  head_ = reinterpret_cast<Head*>(map_->data());
  entries_ = reinterpret_cast<Entry*>(map_->data() + round_up(sizeof(Head), kPage));
}

// A new memfd reads as zeros, which is the first state of every atomic here.
std::shared_ptr<Board> Board::create(int ranks) {
  return std::shared_ptr<Board>(new Board(File::create("zbpipe-board"), ranks));
}

std::shared_ptr<Board> Board::open(int pid, int fd, int ranks) {
  return std::shared_ptr<Board>(new Board(File::open(pid, fd), ranks));
}

void Board::touch(int rank, State state) {
  entry(rank).since.store(now_ns(), std::memory_order_relaxed);
  entry(rank).state.store(state, std::memory_order_release);
}

void Board::enter(int rank) {
  ZB_CHECK(rank >= 0 && rank < ranks_, "rank is not on this board");
  entry(rank).pid.store(getpid(), std::memory_order_relaxed);
  touch(rank, kOutside);
}

void Board::leave(int rank) { touch(rank, kLeft); }
void Board::begin_step(int rank) { touch(rank, kWaiting); }

void Board::end_step(int rank) {
  entry(rank).steps.fetch_add(1, std::memory_order_release);
  touch(rank, kOutside);
}

uint32_t Board::steps(int rank) const { return entry(rank).steps.load(std::memory_order_acquire); }

void Board::running(int rank, const Tag& tag) {
  Entry& e = entry(rank);
  e.stage.store(tag.stage, std::memory_order_relaxed);
  e.microbatch.store(tag.microbatch, std::memory_order_relaxed);
  e.kind.store(tag.kind, std::memory_order_relaxed);
  touch(rank, kRunning);
}

void Board::waiting(int rank) { touch(rank, kWaiting); }

Tag Board::tag_of(int rank) const {
  const Entry& e = entry(rank);
  return Tag{e.stage.load(std::memory_order_relaxed), e.microbatch.load(std::memory_order_relaxed),
             e.kind.load(std::memory_order_relaxed)};
}

void Board::abort(const Failure& failure) {
  uint32_t healthy = 0;
  if (!head_->word.compare_exchange_strong(healthy, 1)) return;
  head_->rank = failure.rank;
  head_->tag = failure.tag;
  head_->cause = failure.cause;
  size_t n = std::min(failure.message.size(), sizeof(head_->message) - 1);
  memcpy(head_->message, failure.message.data(), n);
  head_->message[n] = 0;
  store_and_wake(head_->word, 2);
}

Failure Board::failure() const {
  // The writer needs microseconds; if it was killed in between, what it wrote so far must do.
  for (int i = 0; i < 100 && head_->word.load(std::memory_order_acquire) == 1; ++i)
    futex_wait(head_->word, 1, 1'000'000);
  return Failure{head_->rank, head_->tag, head_->cause, head_->message};
}

bool Board::gone(int rank) {
  Entry& e = entry(rank);
  uint32_t state = e.state.load(std::memory_order_acquire);
  if (state == kAbsent) return false;
  return state == kLeft || process_ended(e.pid.load(std::memory_order_relaxed));
}

Failure Board::stalled(int rank, int64_t timeout_ns) const {
  std::string seconds = std::to_string((timeout_ns + 500'000'000) / 1'000'000'000) + " s";
  int who = -1;
  int64_t oldest = INT64_MAX;
  for (int r = 0; r < ranks_; ++r) {
    int64_t since = entry(r).since.load(std::memory_order_relaxed);
    if (entry(r).state.load(std::memory_order_acquire) == kRunning && since < oldest)
      who = r, oldest = since;
  }
  if (who >= 0)
    return {who, tag_of(who), 's', "no progress for " + seconds + ": this action does not return"};
  for (int r = 0; r < ranks_; ++r) {
    uint32_t state = entry(r).state.load(std::memory_order_acquire);
    if (state == kAbsent || (state == kOutside && !reached(steps(r), steps(rank) + 1)))
      return {r, Tag{}, 's',
              "no progress for " + seconds + ": this rank has not entered step " +
                  std::to_string(steps(rank)) + ", where rank " + std::to_string(rank) + " waits"};
  }
  return {
      rank, Tag{}, 's',
      "no progress for " + seconds + ": every rank waits for another; do they run the same steps?"};
}

bool Board::supervise(int rank, int64_t since, int64_t timeout_ns) {
  if (aborted()) return true;
  uint32_t mine = steps(rank);
  int64_t latest = since;
  for (int r = 0; r < ranks_; ++r) {
    latest = std::max(latest, entry(r).since.load(std::memory_order_relaxed));
    if (r == rank || reached(steps(r), mine + 1)) continue;  // it has done its part of this step
    if (gone(r)) {
      bool left = entry(r).state.load(std::memory_order_acquire) == kLeft;
      bool busy = entry(r).state.load(std::memory_order_acquire) == kRunning;
      abort({r, busy ? tag_of(r) : Tag{}, 'd',
             left ? "this rank closed its pipeline before step " + std::to_string(mine)
                  : "the process of this rank died"});
      return true;
    }
  }
  if (now_ns() - latest > timeout_ns) abort(stalled(rank, timeout_ns));
  return aborted();
}

}  // namespace zb
