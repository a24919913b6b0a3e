#include "cuda/staging.hpp"

#include <sys/prctl.h>

#include <algorithm>

#include "cuda/link.hpp"

namespace zb::cuda {
namespace {

// Buffers are no smaller: a page of flags beside less would be much.
constexpr size_t kLeast = 64 << 10;
// Between two looks at a flag that a stream writes: some 3 % of what was waited for already, no
// less than the timer's slack and no more than a hop between hosts may be late by.
constexpr int64_t kShortestNap = 20'000, kLongestNap = 200'000;
constexpr int64_t kNapShare = 32;

size_t flags_bytes(int slots) { return round_up(slots * sizeof(ArrivalFlags), kPage); }

std::shared_ptr<File> file_of(size_t bytes) {
  auto file = File::create("zbpipe-staging");
  file->grow(bytes);
  return file;
}

}  // namespace

HostBuffer::HostBuffer(std::shared_ptr<const Runtime> runtime, size_t bytes)
    : capacity_(bytes), memory_(std::move(runtime), *file_of(kPage + bytes), kPage + bytes) {}

void Depot::finish() {
  ending_ = true;
  ring();
}

void Depot::ring() {
  bell_.fetch_add(1, std::memory_order_release);
  futex_wake(bell_);
}

bool Depot::sleep(uint32_t seen, int64_t end) const {
  int64_t left = end - now_ns();
  if (left <= 0 || board_->aborted()) return false;
  futex_wait(bell_, seen, std::min(left, kSliceNs));
  return !board_->aborted();
}

template <class Over>
bool Depot::watch(const Over& over, int64_t end) const {
  // For the naps: the default of 50 µs would lengthen each of them.
  thread_local int slack = prctl(PR_SET_TIMERSLACK, 1UL);
  (void)slack;
  int64_t began = now_ns();
  while (!over()) {
    int64_t now = now_ns();
    // Who ends asks again soon, and may be told to stop.
    if (now >= (ending_ ? std::min(end, began + kSliceNs) : end) || board_->aborted()) return false;
    timespec t = to_timespec(std::clamp((now - began) / kNapShare, kShortestNap, kLongestNap));
    nanosleep(&t, nullptr);
  }
  return true;
}

Departures::Departures(std::shared_ptr<const Runtime> runtime, std::shared_ptr<Board> board,
                       int rank, int device, int slots, size_t ahead)
    : Depot(std::move(board), rank),
      runtime_(std::move(runtime)),
      device_(device),
      slots_(static_cast<size_t>(slots)),
      ahead_(ahead) {}

HostBuffer* Departures::vacant(size_t bytes) {
  auto small = buffers_.end();
  for (auto at = buffers_.begin(); at != buffers_.end(); ++at) {
    HostBuffer& buffer = **at;
    if (!buffer.memory().taken(buffer.sent(), buffer.filled, buffer.data())) continue;
    if (buffer.capacity() >= bytes) return &buffer;
    small = at;
  }
  size_t kept = buffers_.size() - (small == buffers_.end() ? 0 : 1);
  if (kept >= slots_ && held_ + roomy(bytes, kLeast) > ahead_) return nullptr;
  if (small != buffers_.end()) {
    outgrown_.push_back(std::move(*small));
    buffers_.erase(small);
  }
  return add(bytes);
}

void Departures::collect() {
  for (const auto& buffer : outgrown_) held_ -= buffer->capacity();
  outgrown_.clear();
}

HostBuffer* Departures::add(size_t bytes) {
  OnDevice scope(*runtime_, device_);
  buffers_.push_back(std::make_unique<HostBuffer>(runtime_, roomy(bytes, kLeast)));
  held_ += buffers_.back()->capacity();
  return buffers_.back().get();
}

void Departures::fill(Stream stream, HostBuffer& buffer, int slot, const Message& message) {
  for (const Piece& piece : message.pieces)
    ZB_CUDA(*runtime_, cudaMemcpyAsync(buffer.data() + piece.offset, piece.data, piece.bytes,
                                       kMemcpyDefault, stream));
  buffer.memory().write(stream, buffer.ready(), ++buffer.filled);
  {
    std::lock_guard<std::mutex> guard(mutex_);
    loads_.push_back({&buffer, buffer.filled, slot, message.payload});
  }
  ring();
}

std::optional<Parcel> Departures::take(int64_t ns) {
  int64_t end = now_ns() + ns;
  std::optional<Load> load;
  while (!load) {
    uint32_t bell = bell_.load(std::memory_order_acquire);
    {
      std::lock_guard<std::mutex> guard(mutex_);
      if (!loads_.empty()) load = loads_.front();
    }
    if (!load && (ending_ || !sleep(bell, end))) return std::nullopt;
  }
  const HostBuffer& from = *load->buffer;
  auto copied = [&] { return from.memory().seen(from.ready(), load->number); };
  if (!watch(copied, end) || board_->aborted()) return std::nullopt;
  from.memory().use(from.data(), load->bytes, false);
  return Parcel{load->slot, 0, load->bytes, load->bytes, from.data(), load->bytes};
}

void Departures::done(int slot) {
  Load load;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    ZB_CHECK(!loads_.empty() && loads_.front().slot == slot, "another message is carried off");
    load = loads_.front();
    loads_.pop_front();
  }
  load.buffer->memory().set(load.buffer->sent(), load.number);
  board_->ring(rank_);
}

bool Departures::finished() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return ending_ && loads_.empty();
}

Arrivals::Arrivals(std::shared_ptr<const Runtime> runtime, std::shared_ptr<Board> board, int rank,
                   int device, int slots)
    : Depot(std::move(board), rank),
      runtime_(std::move(runtime)),
      device_(device),
      words_(runtime_, *file_of(flags_bytes(slots)), flags_bytes(slots)),
      slots_(slots) {}

const char* Arrivals::expect(int index, size_t bytes) {
  Slot& slot = slots_.at(index);
  if (!slot.buffer || slot.buffer->capacity() < bytes) {
    OnDevice scope(*runtime_, device_);
    // What was enqueued may still read the old one.
    if (slot.buffer) outgrown_.push_back(std::move(slot.buffer));
    slot.buffer = std::make_unique<HostBuffer>(runtime_, roomy(bytes, kLeast));
  }
  {
    std::lock_guard<std::mutex> guard(mutex_);
    places_.push_back({slot.buffer.get(), ++slot.expected, index, bytes});
  }
  ring();
  return slot.buffer->data();
}

void Arrivals::wait(Stream stream, int slot, unsigned wait_flags) const {
  words_.wait(stream, flags(slot).ready, slots_.at(slot).expected, wait_flags);
}

void Arrivals::emptied(Stream stream, int slot) const {
  words_.write(stream, flags(slot).free, slots_.at(slot).expected);
}

void Arrivals::abort() const {
  for (int i = 0; i < slots(); ++i) flags(i).ready.store(slots_[i].expected + kPast);
}

std::optional<Parcel> Arrivals::room(int slot, size_t header, size_t payload, size_t carried,
                                     int64_t ns) {
  int64_t end = now_ns() + ns;
  std::optional<Place> place;
  while (!place) {
    uint32_t bell = bell_.load(std::memory_order_acquire);
    {
      std::lock_guard<std::mutex> guard(mutex_);
      if (!places_.empty()) place = places_.front();
    }
    if (ending_ || (!place && !sleep(bell, end))) return std::nullopt;
  }
  ZB_CHECK(place->slot == slot && place->bytes == payload && carried == payload && header == 0,
           "slot " + std::to_string(slot) + " gets " + std::to_string(payload) + " bytes where " +
               std::to_string(place->bytes) + " in slot " + std::to_string(place->slot) +
               " were announced");
  auto emptied = [&] { return words_.seen(flags(slot).free, place->number - 1); };
  // After an abort streams write their flags without having waited.
  if (!watch(emptied, end) || ending_ || board_->aborted()) return std::nullopt;
  place->buffer->memory().use(place->buffer->data(), payload, true);
  return Parcel{slot, 0, payload, payload, place->buffer->data(), payload};
}

void Arrivals::commit(const Parcel& parcel) {
  Place place;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    ZB_CHECK(!places_.empty() && places_.front().slot == parcel.slot,
             "another message is expected");
    place = places_.front();
    places_.pop_front();
  }
  words_.set(flags(parcel.slot).ready, place.number);
}

}  // namespace zb::cuda
