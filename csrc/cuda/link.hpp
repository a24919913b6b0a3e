/// The device's half of a channel, whatever carries the payloads: `ipc` within a host, `nccl`
/// or, staged through host memory, `tcp` across.
///
/// The host's half (transport/channel.hpp) carries the headers, and with them the knowledge of what
/// has been enqueued: a header is published after the message's transfer has been enqueued, and a
/// slot is let go of on the host after that has been enqueued.
#pragma once

#include <memory>
#include <vector>

#include "cuda/runtime.hpp"
#include "transport/channel.hpp"

namespace zb::cuda {

class Communicator;

/// Memory of a device; freed with the last owner.
using DeviceMemory = std::shared_ptr<char>;
/// `bytes` on `device`.
DeviceMemory allocate(const std::shared_ptr<const Runtime>& runtime, int device, size_t bytes);
// cudaMalloc cuts smaller allocations out of blocks of this size, and a handle exports the block.
constexpr size_t kGranule = 2 << 20;
/// The size to allocate for `bytes`, `least` at least, so that a slot which grows does so a few
/// times only.
size_t roomy(size_t bytes, size_t least = kGranule);

/// Keeps for ever what streams may still use.
template <class Held>
void leak(Held& held) {
  if (!held.empty()) new Held(std::move(held));
}

/// What both ends have in common.
class Link {
 public:
  /// `peer` is the rank at the other end.
  Link(int peer, int slots) : peer_(peer), slot_count_(slots) {}
  virtual ~Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  int slots() const { return slot_count_; }
  int peer() const { return peer_; }
  /// Called now and then while a run is under way: does what the other end asks for, and throws
  /// where the link has broken.
  virtual void serve() {}
  /// Lets go on the host what a stream may wait for here; call until the streams have drained. From
  /// any thread.
  virtual void abort() {}
  /// What has to be aborted together with that of the device's other links, or null.
  virtual Communicator* communicator() { return nullptr; }
  /// Lets go of memory that was outgrown; only when the streams have drained.
  virtual void collect() = 0;
  /// Gives everything back; only when the streams have drained.
  virtual void close() = 0;
  /// Leaves no descriptor behind, whatever has to stay mapped.
  virtual void seal() {}

 private:
  int peer_, slot_count_;
};

/// The sender's end.
class OutLink : public Link {
 public:
  using Link::Link;
  /// True when the slot's memory takes `bytes`. Otherwise asks for more, and is to be called again.
  /// Only while nothing of the slot is in use: its last message was let go of.
  virtual bool fits(int, size_t) { return true; }
  /// Enqueues the transfer of the next message of `slot`. It must fit.
  virtual void send(Stream stream, int slot, const Message& message) = 0;
};

/// The receiver's end: owns the slots' memory.
class InLink : public Link {
 public:
  using Link::Link;
  /// Enqueues the arrival of the next message of `slot`, of `bytes`.
  virtual void receive(Stream stream, int slot, size_t bytes) = 0;
  /// True while the slot holds a message that was not let go of.
  virtual bool held(int slot) const = 0;
  /// Enqueues that the message in `slot` is let go of. What reads it must be before, in `stream`.
  virtual void release(Stream stream, int slot) = 0;
  virtual char* payload(int slot) const = 0;
};

}  // namespace zb::cuda
