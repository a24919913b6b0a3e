#include "channel.hpp"

#include <string.h>

#include <algorithm>

namespace zb {

using detail::kPayloadAlign;
using detail::SlotState;

namespace {

size_t control_bytes(int slots) { return round_up(slots * sizeof(SlotState), kPage); }

/// Powers of two: a growing message moves to a new extent only log2 times. Pages that nobody
/// touches cost nothing.
size_t extent_bytes(size_t needed) {
  size_t n = kPage;
  while (n < needed) n *= 2;
  return n;
}

}  // namespace

Sender::Sender(int slots, uint32_t first) : file_(File::create("zbpipe-channel")), extents_(slots) {
  ZB_CHECK(slots >= 1, "a channel needs at least one slot");
  end_ = control_bytes(slots);
  file_->grow(end_);
  control_ = std::make_unique<Mapping>(*file_, 0, end_);
  states_ = reinterpret_cast<SlotState*>(control_->data());
  for (int slot = 0; slot < slots; ++slot) {
    extents_[slot].sent = first;
    states_[slot].ready.store(first, std::memory_order_relaxed);
    states_[slot].free.store(first, std::memory_order_relaxed);
  }
}

void Sender::ensure(Extent& extent, size_t bytes) {
  if (extent.map && extent.map->size() >= bytes) return;
  if (extent.map) file_->punch(extent.offset, extent.map->size());
  size_t capacity = extent_bytes(bytes);
  file_->grow(end_ + capacity);
  extent.map = std::make_unique<Mapping>(*file_, end_, capacity);
  extent.offset = end_;
  end_ += capacity;
}

char* Sender::room(int slot, size_t header, size_t carried) {
  ZB_CHECK(header <= detail::kMostHeader && carried <= detail::kMostPayload,
           "a message is larger than memory");
  Extent& extent = extents_.at(slot);
  ensure(extent, std::max<size_t>(round_up(header, kPayloadAlign) + carried, 1));
  return extent.map->data();
}

bool Sender::send(int slot, const Message& message, const Wait& wait) {
  if (!wait(states_[slot].free, extents_.at(slot).sent)) return false;
  char* base = room(slot, message.header.size(), message.payload);
  char* start = base + round_up(message.header.size(), kPayloadAlign);
  memcpy(base, message.header.data(), message.header.size());
  for (const Piece& p : message.pieces) memcpy(start + p.offset, p.data, p.bytes);
  if (message.pieces.empty() && message.payload > 0) {
    scratch_.resize(std::max(scratch_.size(), message.payload));
    memcpy(start, scratch_.data(), message.payload);
  }
  commit(slot, message.header.size(), message.payload, message.payload);
  return true;
}

bool Sender::vacant(int slot) const {
  return reached(states_[slot].free.load(std::memory_order_acquire), extents_.at(slot).sent);
}

void Sender::announce(int slot, const std::string& header, size_t payload) {
  ZB_CHECK(vacant(slot), "a header goes into a slot that is in use");
  memcpy(room(slot, header.size(), 0), header.data(), header.size());
  commit(slot, header.size(), payload, 0);
}

void Sender::commit(int slot, size_t header, size_t payload, size_t carried) {
  Extent& extent = extents_[slot];
  SlotState& state = states_[slot];
  state.header = static_cast<uint32_t>(header);
  state.offset = extent.offset;
  state.capacity = extent.map->size();
  state.payload = payload;
  state.carried = carried;
  store_and_wake(state.ready, ++extent.sent);
  if (watcher_) watcher_(slot);
}

Receiver::Receiver(std::shared_ptr<File> file, int slots, bool poison)
    : file_(std::move(file)), received_(slots), maps_(slots), offsets_(slots, 0), poison_(poison) {
  control_ = std::make_unique<Mapping>(*file_, 0, control_bytes(slots));
  states_ = reinterpret_cast<SlotState*>(control_->data());
  for (int slot = 0; slot < slots; ++slot)
    received_[slot] = states_[slot].free.load(std::memory_order_acquire);
}

bool Receiver::receive(int slot, const Wait& wait) {
  SlotState& state = states_[slot];
  release(slot);
  if (!wait(state.ready, received_.at(slot) + 1)) return false;
  if (offsets_[slot] != state.offset) {
    maps_[slot] = std::make_shared<Mapping>(*file_, state.offset, state.capacity);
    offsets_[slot] = state.offset;
  }
  ++received_[slot];
  return true;
}

bool Receiver::arrived(int slot) const {
  return reached(states_[slot].ready.load(std::memory_order_acquire), received_.at(slot) + 1);
}

void Receiver::release(int slot) {
  SlotState& state = states_[slot];
  if (state.free.load(std::memory_order_relaxed) == received_.at(slot)) return;
  // All ones is a NaN in every floating-point type: a late reader shows itself.
  if (poison_) memset(payload(slot), 0xff, state.payload);
  store_and_wake(state.free, received_[slot]);
}

void Receiver::release_all() {
  for (int slot = 0; slot < slots(); ++slot) release(slot);
}

std::string Receiver::header(int slot) const {
  ZB_CHECK(maps_.at(slot), "no message in this slot yet");
  return std::string(maps_[slot]->data(), states_[slot].header);
}

char* Receiver::payload(int slot) const {
  ZB_CHECK(maps_.at(slot), "no message in this slot yet");
  return maps_[slot]->data() + round_up(states_[slot].header, kPayloadAlign);
}

size_t Receiver::payload_bytes(int slot) const { return states_[slot].payload; }
std::shared_ptr<Mapping> Receiver::mapping(int slot) const { return maps_.at(slot); }

}  // namespace zb
