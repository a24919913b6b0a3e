#include "transport/relay.hpp"

#include <algorithm>

namespace zb {

using detail::kPayloadAlign;

namespace {

size_t contiguous(size_t header, size_t carried) {
  return carried == 0 ? header : round_up(header, kPayloadAlign) + carried;
}

}  // namespace

Outlet::Outlet(std::shared_ptr<Board> board, int rank, std::shared_ptr<Sender> sender,
               uint64_t first)
    : board_(std::move(board)),
      rank_(rank),
      sender_(std::move(sender)),
      queue_(std::make_shared<Queue>(sender_->slots(), first)),
      taken_(first) {
  sender_->watch([queue = queue_](int slot) {
    uint64_t n = queue->published.load(std::memory_order_relaxed);
    queue->order[n % queue->order.size()].store(slot, std::memory_order_relaxed);
    queue->published.store(n + 1, std::memory_order_release);
    queue->bell.fetch_add(1, std::memory_order_release);
    futex_wake(queue->bell);
  });
}

Outlet::~Outlet() { finish(); }

std::optional<Parcel> Outlet::take(int64_t ns) {
  int64_t end = now_ns() + ns;
  while (true) {
    uint32_t bell = queue_->bell.load(std::memory_order_acquire);
    if (board_->aborted()) return std::nullopt;
    if (queue_->published.load(std::memory_order_acquire) > taken_) break;
    int64_t left = end - now_ns();
    if (queue_->ending || left <= 0) return std::nullopt;
    futex_wait(queue_->bell, bell, std::min(left, kSliceNs));
  }
  Parcel parcel;
  parcel.slot = queue_->order[taken_ % queue_->order.size()].load(std::memory_order_relaxed);
  ++taken_;
  const detail::SlotState& state = sender_->state(parcel.slot);
  parcel.header = state.header;
  parcel.payload = state.payload;
  parcel.carried = state.carried;
  parcel.data = const_cast<char*>(sender_->data(parcel.slot));
  parcel.bytes = contiguous(parcel.header, parcel.carried);
  return parcel;
}

void Outlet::done(int slot) {
  sender_->free(slot);
  board_->ring(rank_);
}

void Outlet::finish() {
  queue_->ending = true;
  queue_->bell.fetch_add(1, std::memory_order_release);
  futex_wake(queue_->bell);
}

bool Outlet::finished() const {
  return queue_->ending && queue_->published.load(std::memory_order_acquire) == taken_;
}

Inlet::Inlet(std::shared_ptr<Board> board, int rank, int slots, uint32_t first)
    : board_(std::move(board)), rank_(rank), sender_(slots, first) {}

std::optional<Parcel> Inlet::room(int slot, size_t header, size_t payload, size_t carried,
                                  int64_t ns) {
  ZB_CHECK(slot >= 0 && slot < sender_.slots(), "a message for a slot that is not there");
  ZB_CHECK(header <= detail::kMostHeader && payload <= detail::kMostPayload,
           "a message of " + std::to_string(header) + " and " + std::to_string(payload) +
               " bytes, which is more than fits into memory");
  ZB_CHECK(carried == 0 || carried == payload, "a message carries all of its payload or nothing");
  int64_t end = now_ns() + ns;
  const Word& free = sender_.state(slot).free;
  while (true) {
    uint32_t seen = free.load(std::memory_order_acquire);
    if (board_->aborted() || ending_) return std::nullopt;
    if (sender_.vacant(slot)) break;
    int64_t left = end - now_ns();
    if (left <= 0) return std::nullopt;
    futex_wait(free, seen, std::min(left, kSliceNs));
  }
  Parcel parcel{slot, header, payload, carried, sender_.room(slot, header, carried), 0};
  parcel.bytes = contiguous(header, carried);
  return parcel;
}

void Inlet::commit(const Parcel& parcel) {
  sender_.commit(parcel.slot, parcel.header, parcel.payload, parcel.carried);
  board_->ring(rank_);
}

}  // namespace zb
