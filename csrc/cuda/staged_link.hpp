/// Links across hosts without NCCL: payloads go through host memory, and a carrier at either end
/// moves them over a connection (staging.hpp, runtime/bridge.py). Not yet run on a GPU.
///
///     sender's lane: copy to the host, write `ready` ┄▶ carrier: send
///     carrier: receive, write `ready` ┄▶ receiver's lane: copy to the device, write `free`
///
/// Why this cannot deadlock, with any number of hardware queues. Order what any rank enqueues by
/// time, as docs/cuda.md does. The sender's stream waits for nothing here. The receiver's waits for
/// a flag of its carrier. Carriers take a channel's messages in the order in which they are
/// enqueued, so before that one only messages that were enqueued earlier; for each of them they
/// wait for
///   * its copy to the host: enqueued before its header was published, and so before its receive;
///   * its receive to be enqueued, which is in the same lane and earlier;
///   * the copy out of the buffer's last message: in that lane, and earlier still.
/// All of that is earlier than the wait, so the earliest unfinished entry can always run, and a
/// carrier is only ever held up by entries that run. Hosts wait where a buffer of the sender is not
/// free: for its carrier, so for entries that were enqueued, and for receives that the other host
/// enqueues at its own time. That is what the CPU executor's sender waits for, which has a buffer a
/// slot (here there are no fewer), and that has been proven to end (zbpipe.program.cosimulate).
#pragma once

#include <memory>
#include <vector>

#include "board.hpp"
#include "cuda/link.hpp"
#include "cuda/runtime.hpp"
#include "cuda/staging.hpp"

namespace zb::cuda {

class StagedOut : public OutLink {
 public:
  /// Of `rank`, on `device`. `ahead`: bytes of host memory up to which a message need not wait for
  /// those before it; buffers for as many messages as there are slots are made in any case.
  StagedOut(std::shared_ptr<const Runtime> runtime, std::shared_ptr<Board> board, int rank,
            int device, int peer, int slots, size_t ahead);
  /// Leaks what streams may still use, unless closed.
  ~StagedOut() override;

  /// What the carrier works on; it may outlive the link, since what was sent is still carried off.
  const std::shared_ptr<Departures>& departures() const { return departures_; }
  /// True when a host buffer is free: the host then need not wait for the device, nor for the net.
  bool fits(int slot, size_t bytes) override;
  void send(Stream stream, int slot, const Message& message) override;
  void collect() override { departures_->collect(); }
  void close() override;

 private:
  std::shared_ptr<Departures> departures_;
  bool closed_ = false;
};

/// Owns the slots' memory on the device; they grow on this side alone.
class StagedIn : public InLink {
 public:
  StagedIn(std::shared_ptr<const Runtime> runtime, std::shared_ptr<Board> board, int rank,
           int device, int peer, int slots, bool poison);
  ~StagedIn() override;

  const std::shared_ptr<Arrivals>& arrivals() const { return arrivals_; }
  void receive(Stream stream, int slot, size_t bytes) override;
  bool held(int slot) const override { return slots_.at(slot).held; }
  void release(Stream stream, int slot) override;
  char* payload(int slot) const override { return slots_.at(slot).memory.get(); }
  /// From any thread, also while another one closes.
  void abort() override {
    if (auto arrivals = std::atomic_load(&arrivals_)) arrivals->abort();
  }
  void collect() override;
  void close() override;

 private:
  struct Slot {
    DeviceMemory memory;
    size_t capacity = 0, bytes = 0;
    bool held = false;
  };
  std::shared_ptr<const Runtime> runtime_;
  int device_;
  unsigned wait_flags_;
  bool poison_;
  std::shared_ptr<Arrivals> arrivals_;
  std::vector<Slot> slots_;
  std::vector<DeviceMemory> outgrown_;
  bool closed_ = false;
};

}  // namespace zb::cuda
