/// What only the fake has: kernels with declared reads and writes, planted faults, and its
/// findings.
#include <string.h>
#include <unistd.h>

#include <vector>

#include "process.hpp"

using namespace fake;

#define API extern "C" __attribute__((visibility("default")))

namespace {

/// Memory that a kernel reads or writes. `pattern` is what it must hold, or what it is given; 0:
/// any.
struct Span {
  char* data;
  uint64_t bytes;
  uint64_t pattern;
};

struct Kernel {
  std::string name;
  std::vector<Span> reads, writes;
  unsigned us;  // what it takes
};

char byte_of(uint64_t pattern, uint64_t i) {
  return static_cast<char>((pattern * 0x9E3779B97F4A7C15ULL) >> (8 * (i % 8))) +
         static_cast<char>(i / 8);
}

void check(const Kernel& kernel, const Span& span) {
  if (span.pattern == 0 || span.bytes == 0) return;
  if (process().find(span.data, span.bytes, kernel.name) == nullptr) return;
  for (uint64_t i = 0; i < span.bytes; ++i) {
    if (span.data[i] == byte_of(span.pattern, i)) continue;
    process().universe.report("wrong contents: " + kernel.name + " reads byte " +
                              std::to_string(i) + " of " + std::to_string(span.bytes));
    return;
  }
}

void launch(Stream* stream, const Kernel& kernel) {
  // As torch does after every launch.
  if (last_error() != 0)
    process().universe.report("a launch finds the error that another call left behind");
  Op op;
  op.stream = stream;
  op.work = true;
  for (const auto* spans : {&kernel.reads, &kernel.writes})
    for (const Span& s : *spans)
      if (s.bytes > 0) op.uses.push_back(s.data);
  op.effect = [stream, kernel] {
    Process& p = process();
    for (const Span& s : kernel.reads)
      p.access(stream->actor, s.data, s.bytes, false, kernel.name + "'s read");
    for (const Span& s : kernel.writes)
      p.access(stream->actor, s.data, s.bytes, true, kernel.name + "'s write");
    for (const Span& s : kernel.reads) check(kernel, s);
    if (kernel.us > 0) usleep(kernel.us);
    for (const Span& s : kernel.writes)
      for (uint64_t i = 0; i < s.bytes; ++i) s.data[i] = byte_of(s.pattern, i);
  };
  process().enqueue(std::move(op));
}

Kernel make(const char* name, const Span* reads, int n, const Span* writes, int m, unsigned us) {
  return {name, {reads, reads + n}, {writes, writes + m}, us};
}

}  // namespace

/// Enqueues a kernel that takes `us` microseconds.
API void fake_kernel(void* stream, const char* name, const Span* reads, int n, const Span* writes,
                     int m, unsigned us) {
  launch(static_cast<Stream*>(stream), make(name, reads, n, writes, m, us));
}

/// An executable graph of one kernel.
API void* fake_graph(const char* name, const Span* reads, int n, const Span* writes, int m) {
  return new Kernel(make(name, reads, n, writes, m, 0));
}

API int cudaGraphLaunch(void* exec, void* stream) {
  launch(static_cast<Stream*>(stream), *static_cast<Kernel*>(exec));
  return 0;
}

/// Plants a fault: the `n`-th call of that kind on the stream, from now on, misbehaves; -2: all do.
API void fake_fault(void* stream, int kind, int n) {
  auto* s = static_cast<Stream*>(stream);
  s->seen[kind] = 0;
  s->fault_at[kind] = n;
}

/// The host holds `data` no longer, or again (`home` null): as an allocator that keeps memory for
/// the stream it was first used on.
API void fake_hold(void* data, void* home) {
  Process& p = process();
  const Allocation* found = p.find(data, 0, "an allocator");
  if (found == nullptr) return;
  if (home == nullptr) return p.take(found->buffer);
  Locked locked(p.universe);
  p.universe.let_go(p.known, found->buffer, static_cast<Stream*>(home)->actor);
}

/// Everything that was found wrong, one a line; at most `bytes`. Returns the length.
API int fake_reports(char* out, int bytes) {
  std::string text = process().universe.reports();
  strncpy(out, text.c_str(), static_cast<size_t>(bytes));
  return static_cast<int>(text.size());
}

/// Calls of a function so far in this process; of those that may block the host, or allocate.
API int fake_calls(const char* call) {
  Process& p = process();
  std::lock_guard<std::mutex> guard(p.mutex);
  auto found = p.calls.find(call);
  return found == p.calls.end() ? 0 : found->second;
}

/// Begins anew, with the environment as it is now. No stream may be in use.
API void fake_reset() { reset(); }

/// Lets copies read the host's memory, as CUDA does, until the next reset.
API void fake_host_reads() { process().host_reads = true; }
