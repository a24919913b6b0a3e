/// Stream-ordered flags of the fake device: writes, and waits that are ordered after the one write
/// of the value they wait for.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

#include "process.hpp"

using namespace fake;

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kOk = 0, kInvalidValue = 1;

Stream* as_stream(void* stream) { return static_cast<Stream*>(stream); }

}  // namespace

API int cuStreamWaitValue32_v2(void* stream, uint64_t address, uint32_t value, unsigned flags) {
  Stream* s = as_stream(stream);
  Word word;
  Process& p = process();
  unsigned want = can_flush() != 0 ? 1U << 30 : 0U;
  if (flags != want || !p.word(address, word)) return kInvalidValue;
  if (s->faulty(kSkipWaitValue)) return kOk;
  Op op;
  op.stream = s;
  op.uses = {word.at};
  op.wait = [word, value] {
    while (true) {
      uint32_t now = __atomic_load_n(word.at, __ATOMIC_ACQUIRE);
      if (static_cast<int32_t>(now - value) >= 0) return;
      // An abort's write comes from the host, which wakes nobody.
      timespec slice{0, 1'000'000};
      syscall(SYS_futex, word.at, FUTEX_WAIT, now, &slice, nullptr, 0);
    }
  };
  op.order = [word, value, &p](Clock& clock) {
    auto& write = p.universe.flag(word.file, word.offset).history[value % kHistory];
    if (write.written && write.value == value) clock.join(write.clock);
  };
  p.enqueue(std::move(op));
  return kOk;
}

API int cuStreamWriteValue32_v2(void* stream, uint64_t address, uint32_t value, unsigned flags) {
  Word word;
  Process& p = process();
  if (flags != 0 || !p.word(address, word)) return kInvalidValue;
  Stream* s = as_stream(stream);
  bool early = s->faulty(kWriteEarly);
  Op op;
  op.stream = s;
  op.uses = {word.at};
  op.order = [word, value, early, s, &p](Clock& clock) {
    auto& write = p.universe.flag(word.file, word.offset).history[value % kHistory];
    write.written = true;
    write.value = value;
    write.clock = early ? s->before_last_work : clock;
  };
  op.effect = [word, value] {
    __atomic_store_n(word.at, value, __ATOMIC_RELEASE);
    syscall(SYS_futex, word.at, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  };
  p.enqueue(std::move(op));
  return kOk;
}
