#include "board.hpp"

#include <stdio.h>
#include <string.h>

#include <algorithm>

namespace zb {
namespace {

constexpr uint32_t kHealthy = 0, kPublished = 1, kWriting = 2;

// A process that runs says so several times a second; on a busy machine it may be late.
constexpr int64_t kFrozenNs = 1'000'000'000;

struct Process {
  bool alive = false;
  uint64_t born = 0;  // clock ticks since boot
};

/// Looks up a process in /proc. A zombie that nobody has reaped is not alive. Where /proc does not
/// answer at all, the process counts as alive: what it does not do will time out.
Process look_up(int pid) {
  FILE* file = fopen(("/proc/" + std::to_string(pid) + "/stat").c_str(), "re");
  if (file == nullptr) return {errno != ENOENT && errno != ESRCH, 0};
  char line[1024];
  size_t n = fread(line, 1, sizeof(line) - 1, file);
  fclose(file);
  line[n] = 0;
  // The second field is the program's name in brackets, which may hold spaces and brackets.
  const char* rest = strrchr(line, ')');
  Process process;
  char state = 0;
  unsigned long long born = 0;
  // Fields 3 and 22 of proc_pid_stat(5).
  if (rest == nullptr ||
      sscanf(rest + 1,
             " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
             &state, &born) != 2)
    return {n > 0, 0};
  process.alive = state != 'Z' && state != 'X';
  process.born = born;
  return process;
}

}  // namespace

Board::Board(std::shared_ptr<File> file, int ranks)
    : file_(std::move(file)), ranks_(ranks), owner_(getpid()) {
  ZB_CHECK(ranks >= 1, "a board needs at least one rank");
  size_t bytes = round_up(sizeof(Head), kPage) + round_up(ranks * sizeof(Entry), kPage);
  file_->grow(bytes);
  map_ = std::make_unique<Mapping>(*file_, 0, bytes);
  head_ = reinterpret_cast<Head*>(map_->data());
  entries_ = reinterpret_cast<Entry*>(map_->data() + round_up(sizeof(Head), kPage));
}

// A new memfd reads as zeros, which is the first state of every atomic here.
std::shared_ptr<Board> Board::create(int ranks) {
  std::shared_ptr<Board> board(new Board(File::create("zbpipe-board"), ranks));
  board->make_lock();
  return board;
}

std::shared_ptr<Board> Board::open(int pid, int fd, int ranks) {
  return std::shared_ptr<Board>(new Board(File::open(pid, fd), ranks));
}

int Board::fd() const {
  ZB_CHECK(file_ != nullptr, "this board is sealed");
  return file_->fd();
}

void Board::touch(int rank, State state) {
  entry(rank).since.store(now_ns(), std::memory_order_relaxed);
  entry(rank).state.store(state, std::memory_order_release);
  // Last: whoever reads this number reads what it counts, or newer (`report`).
  entry(rank).changes.fetch_add(1, std::memory_order_release);
}

void Board::enter(int rank) {
  ZB_CHECK(rank >= 0 && rank < ranks_, "rank is not on this board");
  entry(rank).pid.store(getpid(), std::memory_order_relaxed);
  entry(rank).born.store(look_up(getpid()).born, std::memory_order_relaxed);
  touch(rank, kOutside);
}

void Board::leave(int rank) { touch(rank, kLeft); }

void Board::begin_step(int rank) {
  entry(rank).seen.store(now_ns(), std::memory_order_relaxed);
  touch(rank, kWaiting);
}

void Board::end_step(int rank) {
  entry(rank).steps.fetch_add(1, std::memory_order_release);
  touch(rank, kOutside);
}

uint32_t Board::changes(int rank) const {
  return entry(rank).changes.load(std::memory_order_acquire);
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

void Board::ring(int rank) {
  entry(rank).bell.fetch_add(1, std::memory_order_release);
  futex_wake(entry(rank).bell);
}

Tag Board::tag_of(int rank) const {
  const Entry& e = entry(rank);
  return Tag{e.stage.load(std::memory_order_relaxed), e.microbatch.load(std::memory_order_relaxed),
             e.kind.load(std::memory_order_relaxed)};
}

void Board::abort(const Failure& failure) {
  if (getpid() != owner_) return;
  uint32_t healthy = kHealthy;
  uint32_t writing = kWriting + static_cast<uint32_t>(std::max(failure.rank, 0));
  if (!head_->word.compare_exchange_strong(healthy, writing)) return;
  head_->rank = failure.rank;
  head_->tag = failure.tag;
  head_->cause = failure.cause;
  size_t n = std::min(failure.message.size(), sizeof(head_->message) - 1);
  memcpy(head_->message, failure.message.data(), n);
  head_->message[n] = 0;
  store_and_wake(head_->word, kPublished);
}

Failure Board::failure() const {
  // The writer needs microseconds, unless it was killed in between.
  uint32_t word = head_->word.load(std::memory_order_acquire);
  for (int i = 0; i < 100 && word >= kWriting; ++i) {
    futex_wait(head_->word, word, 1'000'000);
    word = head_->word.load(std::memory_order_acquire);
  }
  if (word >= kWriting)
    return {static_cast<int32_t>(word - kWriting), Tag{}, 'd',
            "this rank failed, and the process that was to say how died"};
  return {head_->rank, head_->tag, head_->cause, head_->message};
}

bool Board::watch(int64_t ns) const {
  int64_t end = now_ns() + ns;
  for (int64_t left = ns; left > 0 && !aborted(); left = end - now_ns())
    futex_wait(head_->word, head_->word.load(std::memory_order_acquire), left);
  return aborted();
}

bool Board::gone(int rank) const {
  const Entry& e = entry(rank);
  uint32_t state = e.state.load(std::memory_order_acquire);
  if (state == kLeft) return true;
  if (e.elsewhere) return e.lost != kThere;
  int pid = e.pid.load(std::memory_order_relaxed);
  if (state == kAbsent || pid == owner_) return false;
  Process process = look_up(pid);
  if (!process.alive) return true;
  // The system may have given the pid to another process.
  return process.born != 0 && process.born != e.born.load(std::memory_order_relaxed);
}

std::string Board::farewell(int rank, uint32_t step) const {
  if (entry(rank).state.load(std::memory_order_acquire) == kLeft)
    return "this rank closed its pipeline before step " + std::to_string(step);
  if (entry(rank).elsewhere && entry(rank).lost == kCut)
    return "the process of this rank, on another host, died, or the connection to it broke";
  return "the process of this rank died";
}

bool Board::unheard(int rank, int64_t timeout_ns) const {
  return entry(rank).elsewhere &&
         now_ns() - entry(rank).heard.load() > std::max(timeout_ns / 2, kFrozenNs);
}

Failure Board::stalled(int rank, int64_t timeout_ns) const {
  char begin[64];
  snprintf(begin, sizeof(begin), "no progress for %g s: ", static_cast<double>(timeout_ns) / 1e9);
  int slow = -1, frozen = -1, silent = -1;
  int64_t oldest = INT64_MAX, unseen = now_ns() - std::max(timeout_ns / 2, kFrozenNs);
  for (int r = 0; r < ranks_; ++r) {
    uint32_t state = entry(r).state.load(std::memory_order_acquire);
    int64_t since = entry(r).since.load(std::memory_order_relaxed);
    int64_t seen = entry(r).seen.load(std::memory_order_relaxed);
    if (unheard(r, timeout_ns)) {
      if (silent < 0 && state != kLeft && !reached(steps(r), steps(rank) + 1)) silent = r;
      continue;
    }
    if (state == kRunning && since < oldest) slow = r, oldest = since;
    if (state == kWaiting && seen < unseen) frozen = r, unseen = seen;
  }
  if (slow >= 0)
    return {slow, tag_of(slow), 's', begin + std::string("this action does not return")};
  if (silent >= 0)
    return {silent, Tag{}, 's',
            begin + std::string("nothing is heard of this rank, which is on another host")};
  if (frozen >= 0)
    return {frozen, Tag{}, 's', begin + std::string("the process of this rank does not run")};
  for (int r = 0; r < ranks_; ++r) {
    uint32_t state = entry(r).state.load(std::memory_order_acquire);
    if (state == kAbsent || (state == kOutside && !reached(steps(r), steps(rank) + 1)))
      return {r, Tag{}, 's',
              begin + std::string("this rank has not entered step ") + std::to_string(steps(rank)) +
                  ", where rank " + std::to_string(rank) + " waits"};
  }
  for (int r = 0; r < ranks_; ++r)  // it did its part, but part of that was on its way
    if (entry(r).elsewhere && entry(r).state != kLeft && gone(r))
      return {r, Tag{}, 'd', begin + farewell(r, steps(rank))};
  return {rank, Tag{}, 's',
          begin + std::string("every rank waits for another; do they run the same steps?")};
}

bool Board::supervise(int rank, int64_t timeout_ns) {
  if (aborted()) return true;
  entry(rank).seen.store(now_ns(), std::memory_order_relaxed);
  uint32_t mine = steps(rank);
  int64_t latest = 0;
  for (int r = 0; r < ranks_; ++r) {
    latest = std::max(latest, entry(r).since.load(std::memory_order_relaxed));
    auto did_its_part = [&] { return reached(steps(r), mine + 1); };
    // Asked again at the end: a rank may finish this step and go while it is looked at.
    if (r == rank || did_its_part() || !gone(r) || did_its_part()) continue;
    uint32_t state = entry(r).state.load(std::memory_order_acquire);
    abort({r, state == kRunning ? tag_of(r) : Tag{}, 'd', farewell(r, mine)});
    return true;
  }
  if (now_ns() - latest > timeout_ns) abort(stalled(rank, timeout_ns));
  return aborted();
}

}  // namespace zb
