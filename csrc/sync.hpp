/// Futex words, clocks and small assertions: what every other header builds on.
#pragma once

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace zb {

using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == 4, "a futex word is 32 bits");

/// Waits look up this often to see an abort. Long enough that 40 sleeping lanes cost well under 1 %
/// of a core, short enough that an error reaches every rank in a moment.
constexpr int64_t kSliceNs = 50'000'000;

/// Nanoseconds of CLOCK_MONOTONIC: one clock for all processes of a host.
inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

inline timespec to_timespec(int64_t ns) {
  return timespec{static_cast<time_t>(ns / 1'000'000'000LL),
                  static_cast<long>(ns % 1'000'000'000LL)};
}

/// Sleeps while `word` holds `seen`, at most `ns`. Returns false when the time ran out.
/// Always the shared form: a word may lie in memory that another process maps.
inline bool futex_wait(const Word& word, uint32_t seen, int64_t ns) {
  timespec t = to_timespec(ns);
  long rc = syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAIT, seen, &t,
                    nullptr, 0);
  return !(rc == -1 && errno == ETIMEDOUT);
}

inline void futex_wake(const Word& word) {
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr,
          nullptr, 0);
}

inline void store_and_wake(Word& word, uint32_t value) {
  word.store(value, std::memory_order_release);
  futex_wake(word);
}

/// True when the wrapping counter `a` has reached `b`.
inline bool reached(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) >= 0; }

#define ZB_CHECK(condition, message)                                                          \
  do {                                                                                        \
    if (!(condition))                                                                         \
      throw std::runtime_error(std::string(message) + " (" #condition ", " + __FILE__ + ":" + \
                               std::to_string(__LINE__) + ")");                               \
  } while (0)

}  // namespace zb
