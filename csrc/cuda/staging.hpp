/// Payloads in host memory, between a rank's streams and whoever carries bytes to another host: the
/// part of a staged link (staged_link.hpp) that a carrier works on. To a carrier the two classes
/// are what Outlet and Inlet are (transport/relay.hpp), so that the same code carries both.
///
/// A stream and a carrier hear of each other by flags in registered memory: the stream writes them
/// behind its copies, and the carrier looks; the carrier writes them, and the stream waits. The
/// thread that enqueues never waits for either.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "board.hpp"
#include "cuda/registered.hpp"
#include "transport/relay.hpp"

namespace zb::cuda {

/// Memory of the host that streams copy from and into, with two flags.
class HostBuffer {
 public:
  HostBuffer(std::shared_ptr<const Runtime> runtime, size_t bytes);

  size_t capacity() const { return capacity_; }
  char* data() const { return memory_.data() + kPage; }
  /// Messages that were copied in; by a stream.
  Word& ready() const { return *reinterpret_cast<Word*>(memory_.data()); }
  /// Messages that were carried off; by the carrier.
  Word& sent() const { return *reinterpret_cast<Word*>(memory_.data() + kPage / 2); }
  const Registered& memory() const { return memory_; }

  uint32_t filled = 0;  // messages whose copy was enqueued; of the thread that enqueues

 private:
  size_t capacity_;
  Registered memory_;
};

/// What is common: messages that were enqueued and not carried yet, in order, and one who waits.
class Depot {
 public:
  Depot(std::shared_ptr<Board> board, int rank) : board_(std::move(board)), rank_(rank) {}

  int rank() const { return rank_; }
  /// There will be no more messages than there are.
  void finish();

 protected:
  /// Sleeps until the bell has rung after `seen`, in slices, at most until `end`. False when there
  /// is no use in looking again: the time is over, or the board is aborted.
  bool sleep(uint32_t seen, int64_t end) const;
  /// Naps until `over`, looking again and again: nothing wakes a thread when a stream writes.
  template <class Over>
  bool watch(const Over& over, int64_t end) const;
  void ring();

  std::shared_ptr<Board> board_;
  int rank_;
  std::atomic<bool> ending_{false};
  Word bell_{0};
};

/// The sender's side. A message takes any buffer that is free, and another one is made where none
/// is: so the host is ahead of the device, and the device of the network, by as many messages as
/// fit into `ahead` bytes, and by as many as there are slots in any case.
class Departures : public Depot {
 public:
  Departures(std::shared_ptr<const Runtime> runtime, std::shared_ptr<Board> board, int rank,
             int device, int slots, size_t ahead);

  // For the thread that enqueues:
  /// A buffer for `bytes`, or null: then this rank is rung when one may be there.
  HostBuffer* vacant(size_t bytes);
  /// Enqueues the copy of the message into `buffer`, and hands it to the carrier.
  void fill(Stream stream, HostBuffer& buffer, int slot, const Message& message);
  /// Lets go of what was outgrown; only when the streams have drained.
  void collect();

  // For the carrier, as Outlet's:
  /// The next message, once the device has copied it.
  std::optional<Parcel> take(int64_t ns);
  void done(int slot);
  bool finished() const;

 private:
  struct Load {
    HostBuffer* buffer;
    uint32_t number;  // of the message in the buffer
    int slot;
    size_t bytes;
  };
  HostBuffer* add(size_t bytes);

  std::shared_ptr<const Runtime> runtime_;
  int device_;
  size_t slots_, ahead_;
  size_t held_ = 0;  // bytes, of all buffers, outgrown ones among them
  std::vector<std::unique_ptr<HostBuffer>> buffers_, outgrown_;
  mutable std::mutex mutex_;  // of the loads
  std::deque<Load> loads_;
};

/// A slot's flags at the receiver. Each line has one writer.
struct ArrivalFlags {
  Word ready;             // messages that have come; by the carrier
  alignas(64) Word free;  // messages that were copied out; by the receiver's stream
};

/// The receiver's side: a buffer a slot.
class Arrivals : public Depot {
 public:
  Arrivals(std::shared_ptr<const Runtime> runtime, std::shared_ptr<Board> board, int rank,
           int device, int slots);

  int slots() const { return static_cast<int>(slots_.size()); }

  // For the thread that enqueues:
  /// Where the slot's next message will lie, of `bytes`.
  const char* expect(int slot, size_t bytes);
  /// Enqueues a wait until that message has come.
  void wait(Stream stream, int slot, unsigned flags) const;
  /// Enqueues that it has been copied to where it is read.
  void emptied(Stream stream, int slot) const;
  /// Lets go of what was outgrown; only when the streams have drained and all has been carried.
  void collect() { outgrown_.clear(); }
  /// Lets every wait be over. From any thread.
  void abort() const;

  // For the carrier, as Inlet's:
  /// The message's place, once its receive has been enqueued and the buffer has been emptied.
  std::optional<Parcel> room(int slot, size_t header, size_t payload, size_t carried, int64_t ns);
  void commit(const Parcel& parcel);

 private:
  struct Slot {
    std::atomic<uint32_t> expected{0};
    std::unique_ptr<HostBuffer> buffer;
  };
  struct Place {
    const HostBuffer* buffer;
    uint32_t number;  // of the message in the slot
    int slot;
    size_t bytes;
  };
  ArrivalFlags& flags(int slot) const {
    return reinterpret_cast<ArrivalFlags*>(words_.data())[slot];
  }

  std::shared_ptr<const Runtime> runtime_;
  int device_;
  Registered words_;
  std::vector<Slot> slots_;
  std::vector<std::unique_ptr<HostBuffer>> outgrown_;
  std::mutex mutex_;  // of the places
  std::deque<Place> places_;
};

}  // namespace zb::cuda
