/// The two ends of a channel between ranks that share no memory. The sending rank's channel has an
/// Outlet in place of a receiver, the receiving rank's an Inlet in place of a sender; in between
/// somebody carries bytes, in order (runtime/bridge.py).
///
/// A message leaves its slot at the Outlet as soon as it has been carried off, and is let into the
/// Inlet when the receiver has let go of the slot's message before. So each end holds as many
/// messages as there are slots, and the sender is never ahead by more than both. Carrying in order
/// cannot deadlock: the receiver takes messages in the order in which they are sent, and a rank's
/// lane waits for a slot where the carrier waits.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "board.hpp"
#include "transport/channel.hpp"

namespace zb {

/// A message on its way: `bytes` at `data` are the header and, at the next multiple of 64, what is
/// carried of the payload.
struct Parcel {
  int slot = -1;
  size_t header = 0, payload = 0, carried = 0;
  char* data = nullptr;
  size_t bytes = 0;
};

class Outlet {
 public:
  /// Made before the channel's first message. `rank`: the sending one. `first`: where the count of
  /// messages begins (for tests).
  Outlet(std::shared_ptr<Board> board, int rank, std::shared_ptr<Sender> sender,
         uint64_t first = 0);
  ~Outlet();

  int rank() const { return rank_; }

  /// The next message in the order of publishing. Nothing where `ns` are over, the board is
  /// aborted, or all has been taken after `finish`.
  std::optional<Parcel> take(int64_t ns);
  /// The message has been carried off: the sender may use its slot.
  void done(int slot);
  /// There will be no more messages than have been published.
  void finish();
  /// True when all messages have been taken and there will be no more.
  bool finished() const;

 private:
  /// Outlives the Outlet where the channel does.
  struct Queue {
    Queue(int slots, uint64_t first) : published(first), order(slots) {}
    std::atomic<uint64_t> published;      // never wraps, so that it can count round the ring
    std::vector<std::atomic<int>> order;  // a ring: a slot is in it once at most
    std::atomic<bool> ending{false};
    Word bell{0};
  };
  std::shared_ptr<Board> board_;
  int rank_;
  std::shared_ptr<Sender> sender_;
  std::shared_ptr<Queue> queue_;
  uint64_t taken_;
};

class Inlet {
 public:
  /// `rank`: the receiving one. `first`: as a Sender's.
  Inlet(std::shared_ptr<Board> board, int rank, int slots, uint32_t first = 0);

  int rank() const { return rank_; }
  int fd() const { return sender_.fd(); }
  /// Room for a message, once the receiver has let go of the slot's last one. Nothing where `ns`
  /// are over, the board is aborted, or after `finish`. Throws on sizes that no message has.
  std::optional<Parcel> room(int slot, size_t header, size_t payload, size_t carried, int64_t ns);
  /// The room has been filled: the receiver may read.
  void commit(const Parcel& parcel);
  void finish() { ending_ = true; }

 private:
  std::shared_ptr<Board> board_;
  int rank_;
  Sender sender_;
  std::atomic<bool> ending_{false};
};

}  // namespace zb
