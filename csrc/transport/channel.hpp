/// A channel: messages from one rank to one other on the same host, over slots in shared memory.
///
/// The sender owns the memory. Each slot has two monotonic counters: `ready` (messages written) and
/// `free` (messages the receiver has let go of). A message is copied once, into the slot; the
/// receiver reads it in place. A slot that is too small gets a larger extent from the sender, so
/// shapes may change from step to step. The transports `local` (one process) and `shm` (two) differ
/// only in who opens the file. Between hosts there is a channel at either end, and what is
/// published in one is carried to the other (transport/relay.hpp).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "memory.hpp"
#include "sync.hpp"

namespace zb {

/// A piece of a message's payload: `bytes` from `data`, to lie at `offset` of the payload.
struct Piece {
  const void* data;
  size_t bytes;
  size_t offset;
};

struct Message {
  std::string header;
  std::vector<Piece> pieces;
  size_t payload = 0;  // bytes
};

/// Sleeps until `word` has reached a value; false when the run was aborted meanwhile.
using Wait = std::function<bool(const Word& word, uint32_t value)>;

namespace detail {
/// What a slot's two ends tell each other; each side writes lines of its own.
struct alignas(64) SlotState {
  Word ready;
  uint32_t header;    // bytes
  uint64_t offset;    // of the extent in the file
  uint64_t capacity;  // of the extent
  uint64_t payload;   // bytes
  uint64_t carried;   // bytes of the payload that lie in the slot: all, or none (`announce`)
  alignas(64) Word free;
};
constexpr size_t kPayloadAlign = 64;
constexpr size_t kMostHeader = UINT32_MAX;        // what SlotState can say
constexpr size_t kMostPayload = size_t{1} << 46;  // half of what a process can address, x86-64
}  // namespace detail

class Sender {
 public:
  /// `first`: where the slots' counters begin, which wrap (for tests: 2^32 messages take days).
  explicit Sender(int slots, uint32_t first = 0);

  int fd() const { return file_->fd(); }
  int slots() const { return static_cast<int>(extents_.size()); }
  /// Copies a message into `slot` once the receiver has let go of the slot's last one. With no
  /// pieces, `payload` bytes of the slot are written all the same (the virtual device's traffic).
  bool send(int slot, const Message& message, const Wait& wait);
  /// True when the receiver has let go of the slot's last message.
  bool vacant(int slot) const;
  /// Publishes a header alone, into a vacant slot; the `payload` bytes go another way.
  void announce(int slot, const std::string& header, size_t payload);

  /// What an Outlet and an Inlet are told and tell: who takes messages from here, or brings them.
  /// @{
  using Watcher = std::function<void(int slot)>;
  /// Calls `watcher` after each message is published, in their order.
  void watch(Watcher watcher) { watcher_ = std::move(watcher); }
  const detail::SlotState& state(int slot) const { return states_[slot]; }
  const char* data(int slot) const { return extents_.at(slot).map->data(); }
  /// Lets go of the slot's message in the receiver's stead.
  void free(int slot) { store_and_wake(states_[slot].free, extents_.at(slot).sent); }
  /// Room for a message in a slot that is vacant, to be filled before `commit`.
  char* room(int slot, size_t header, size_t carried);
  void commit(int slot, size_t header, size_t payload, size_t carried);
  /// @}

 private:
  struct Extent {
    size_t offset = 0;
    std::unique_ptr<Mapping> map;
    uint32_t sent = 0;
  };
  void ensure(Extent& extent, size_t bytes);

  std::shared_ptr<File> file_;
  std::unique_ptr<Mapping> control_;
  detail::SlotState* states_;
  std::vector<Extent> extents_;
  size_t end_;
  Watcher watcher_;
  std::vector<char> scratch_;
};

class Receiver {
 public:
  /// Goes on where the slots' last receiver stopped; there was none on a new channel.
  Receiver(std::shared_ptr<File> file, int slots, bool poison);

  int slots() const { return static_cast<int>(received_.size()); }
  /// Waits for the next message of `slot`, after letting go of the one before.
  bool receive(int slot, const Wait& wait);
  /// True when the next message of `slot` is there, the one before being let go of.
  bool arrived(int slot) const;
  /// Lets go of the message in `slot`: the sender may overwrite it. Idempotent.
  void release(int slot);
  void release_all();

  std::string header(int slot) const;
  char* payload(int slot) const;
  size_t payload_bytes(int slot) const;
  /// Keeps the slot's memory mapped for as long as it is held.
  std::shared_ptr<Mapping> mapping(int slot) const;

 private:
  std::shared_ptr<File> file_;
  std::unique_ptr<Mapping> control_;
  detail::SlotState* states_;
  std::vector<uint32_t> received_;
  std::vector<std::shared_ptr<Mapping>> maps_;
  std::vector<uint64_t> offsets_;
  bool poison_;
};

}  // namespace zb
