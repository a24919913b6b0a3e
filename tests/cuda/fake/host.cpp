/// What the host does with registered memory, as zbpipe tells (csrc/cuda/functions.hpp): which
/// flags a thread has seen and set, and what it reads and writes. Edges are as strict as a
/// stream's: to the write of the very value that was waited for, never to what has happened by
/// luck.
#include "process.hpp"

using namespace fake;

#define API extern "C" __attribute__((visibility("default")))

namespace {

Word located(const void* word) {
  Word out{};
  process().host_word(word, out);
  return out;
}

/// The write of `value`, where that has been; the lock is held.
const Clock* written(const Word& word, uint32_t value) {
  if (word.at == nullptr) return nullptr;
  auto& write = process().universe.flag(word.file, word.offset).history[value % kHistory];
  return write.written && write.value == value ? &write.clock : nullptr;
}

}  // namespace

/// The thread has waited until the word reached `value`.
API void zbpipe_host_saw(const void* word, uint32_t value) {
  Process& p = process();
  if (p.blind == kBlindSaw) return;
  Word at = located(word);
  Clock clock{};
  {
    Locked locked(p.universe);
    const Clock* found = written(at, value);
    if (found == nullptr) return;
    clock = *found;
  }
  p.seen(clock, true);
}

/// The thread is about to set the word to `value`, which lets others go on.
API void zbpipe_host_sets(const void* word, uint32_t value) {
  Process& p = process();
  Word at = located(word);
  if (at.at == nullptr) return;
  p.tell([&](const Clock& clock) {
    auto& write = p.universe.flag(at.file, at.offset).history[value % kHistory];
    write.written = true;
    write.value = value;
    write.clock = clock;
  });
}

/// The thread reads or writes from now on, until it next sets a word.
API void zbpipe_host_uses(const void* data, size_t bytes, int write) {
  Process& p = process();
  p.access(p.host(), data, bytes, write != 0, write != 0 ? "the host's write" : "the host's read");
}

/// As `saw`, but for the allocation at `data` alone, and what is enqueued from now on.
API void zbpipe_host_takes(const void* word, uint32_t value, const void* data) {
  Process& p = process();
  if (p.blind == kBlindTakes) return;
  Word at = located(word);
  const Allocation* found = p.find(data, 0, "the host");
  if (found == nullptr) return;
  int buffer = found->buffer;
  Clock clock{};
  {
    Locked locked(p.universe);
    const Clock* known = written(at, value);
    if (known == nullptr) return;
    clock = *known;
  }
  p.take_over(buffer, clock);
}

/// From now on what the process's threads see is lost: 1 of flags, 2 of memory; 0: nothing is.
API void fake_blind(int what) { process().blind = what; }
