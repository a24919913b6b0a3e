/// Host memory that streams and the host share: flags that one writes and the other waits for, and
/// what lies beside them.
#pragma once

#include <memory>

#include "cuda/runtime.hpp"
#include "memory.hpp"
#include "sync.hpp"

namespace zb::cuda {

// What an abort adds to a flag's counter: more than any run counts, less than half of its range.
constexpr uint32_t kPast = 1U << 30;

/// How a stream of `device` waits for a flag. Writes of a peer that reached the device before the
/// flag did are made visible with the wait where the device offers that.
unsigned wait_flags(const Runtime& runtime, int device);

/// The first bytes of a file, mapped and registered with CUDA in this process, for all devices.
/// Given back with the owner, who keeps it for ever where streams may still use it.
class Registered {
 public:
  Registered(std::shared_ptr<const Runtime> runtime, const File& file, size_t bytes);
  ~Registered();
  Registered(const Registered&) = delete;
  Registered& operator=(const Registered&) = delete;

  char* data() const { return map_.data(); }
  size_t size() const { return map_.size(); }
  /// Streams use it no more; it stays mapped.
  void give_back();

  /// Enqueues a wait until `word`, of this memory, has reached `value`.
  void wait(Stream stream, const Word& word, uint32_t value, unsigned flags) const;
  /// Enqueues a write of `word`, after a fence over everything before it.
  void write(Stream stream, const Word& word, uint32_t value) const;

  // The same for a thread of the host, which a stream or another thread hears or is heard by. A
  // library that looks for races in CUDA's place is told (Runtime: host_...).

  /// True when `word` has reached `value`: what was done before it was written is over.
  bool seen(const Word& word, uint32_t value) const;
  /// Lets everything that this thread has done be over for whoever sees `value`.
  void set(Word& word, uint32_t value) const;
  /// This thread begins to read, or to write, `bytes` from `at`, until it sets a word.
  void use(const void* at, size_t bytes, bool write) const;
  /// As `seen`, for the memory at `at` alone: what this thread enqueues from now on may use it.
  bool taken(const Word& word, uint32_t value, const void* at) const;

 private:
  uint64_t device(const Word& word) const;

  std::shared_ptr<const Runtime> runtime_;
  Mapping map_;
  uint64_t device_ = 0;
  bool registered_ = true;
};

}  // namespace zb::cuda
