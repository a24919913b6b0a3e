#include "cuda/staged_link.hpp"

namespace zb::cuda {

StagedOut::StagedOut(std::shared_ptr<const Runtime> runtime, std::shared_ptr<Board> board, int rank,
                     int device, int peer, int slots, size_t ahead)
    : OutLink(peer, slots),
      departures_(std::make_shared<Departures>(std::move(runtime), std::move(board), rank, device,
                                               slots, ahead)) {
  ZB_CHECK(slots >= 1, "a link needs at least one slot");
}

StagedOut::~StagedOut() {
  if (!closed_) new std::shared_ptr<Departures>(std::move(departures_));
}

bool StagedOut::fits(int, size_t bytes) {
  return bytes == 0 || departures_->vacant(bytes) != nullptr;
}

void StagedOut::send(Stream stream, int slot, const Message& message) {
  if (message.payload == 0) return;
  HostBuffer* buffer = departures_->vacant(message.payload);
  ZB_CHECK(buffer != nullptr, "a message finds no host buffer");
  departures_->fill(stream, *buffer, slot, message);
}

void StagedOut::close() {
  if (closed_) return;
  departures_->collect();
  departures_ = nullptr;
  closed_ = true;
}

StagedIn::StagedIn(std::shared_ptr<const Runtime> runtime, std::shared_ptr<Board> board, int rank,
                   int device, int peer, int slots, bool poison)
    : InLink(peer, slots),
      runtime_(runtime),
      device_(device),
      wait_flags_(wait_flags(*runtime_, device)),
      poison_(poison),
      arrivals_(
          std::make_shared<Arrivals>(std::move(runtime), std::move(board), rank, device, slots)),
      slots_(slots) {}

StagedIn::~StagedIn() {
  if (closed_) return;
  leak(slots_);
  leak(outgrown_);
  new std::shared_ptr<Arrivals>(std::move(arrivals_));
}

void StagedIn::receive(Stream stream, int index, size_t bytes) {
  Slot& slot = slots_.at(index);
  slot.held = true;
  slot.bytes = bytes;
  if (slot.capacity < bytes) {
    // What was enqueued may still read the old memory.
    if (slot.memory) outgrown_.push_back(std::move(slot.memory));
    slot.capacity = roomy(bytes);
    slot.memory = allocate(runtime_, device_, slot.capacity);
  }
  if (bytes == 0) return;
  const char* from = arrivals_->expect(index, bytes);
  arrivals_->wait(stream, index, wait_flags_);
  ZB_CUDA(*runtime_, cudaMemcpyAsync(slot.memory.get(), from, bytes, kMemcpyDefault, stream));
  arrivals_->emptied(stream, index);
}

void StagedIn::release(Stream stream, int index) {
  Slot& slot = slots_.at(index);
  // All ones is a NaN in every floating-point type: a late reader shows itself.
  if (slot.held && poison_ && slot.bytes > 0)
    ZB_CUDA(*runtime_, cudaMemsetAsync(slot.memory.get(), 0xff, slot.bytes, stream));
  slot.held = false;
}

void StagedIn::collect() {
  outgrown_.clear();
  arrivals_->collect();
}

void StagedIn::close() {
  if (closed_) return;
  slots_.clear();
  outgrown_.clear();
  // What the carrier may be at, an outgrown buffer among it, goes with the later of the two.
  std::atomic_store(&arrivals_, std::shared_ptr<Arrivals>());
  closed_ = true;
}

}  // namespace zb::cuda
