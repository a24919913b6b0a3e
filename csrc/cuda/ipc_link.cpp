#include "cuda/ipc_link.hpp"

#include <algorithm>

namespace zb::cuda {
namespace {

// How long the receiver waits, when it closes, for the sender to let go of the slots' memory.
constexpr int64_t kCloseNs = 1'000'000'000;

size_t words_bytes(int slots) { return round_up(slots * sizeof(LinkSlot), kPage); }

}  // namespace

LinkWords::LinkWords(std::shared_ptr<const Runtime> runtime, std::shared_ptr<File> file, int slots)
    : memory(slots),
      file_(std::move(file)),
      slots_(slots),
      shared_(std::move(runtime), *file_, words_bytes(slots)),
      at_(reinterpret_cast<LinkSlot*>(shared_.data())) {}

void LinkWords::make_local() {
  ZB_CHECK(!local_, "a link has one receiver");
  local_ = true;
  ends_ = 2;
}

void LinkWords::leave() {
  if (ends_.fetch_sub(1) != 1) return;
  memory.clear();
  shared_.give_back();
}

IpcOut::IpcOut(std::shared_ptr<const Runtime> runtime, std::shared_ptr<Board> board, int device,
               int peer, int slots)
    : OutLink(peer, slots),
      runtime_(std::move(runtime)),
      board_(std::move(board)),
      device_(device),
      wait_flags_(wait_flags(*runtime_, device)),
      slots_(slots) {
  ZB_CHECK(slots >= 1, "a link needs at least one slot");
  ZB_CHECK(peer >= 0 && peer < board_->ranks(), "a link's peer is not on the board");
  OnDevice scope(*runtime_, device_);
  auto file = File::create("zbpipe-link");
  file->grow(words_bytes(slots));
  words_ = std::make_shared<LinkWords>(runtime_, std::move(file), slots);
}

IpcOut::~IpcOut() {
  if (closed_) return;
  leak(slots_);
  leak(outgrown_);
  words_->seal();
  new std::shared_ptr<LinkWords>(std::move(words_));
}

void IpcOut::set_aside(int index) {
  Slot& slot = slots_[index];
  if (slot.data != nullptr)
    outgrown_.push_back({index, slot.generation, slot.opened, std::move(slot.memory)});
  slot.opened = nullptr;
  slot.data = nullptr;
  slot.capacity = 0;
}

void IpcOut::adopt(int index) {
  Slot& slot = slots_[index];
  LinkSlot& shared = (*words_)[index];
  uint32_t generation = shared.generation.load(std::memory_order_acquire);
  if (generation == slot.generation) return;
  set_aside(index);
  if (words_->local()) {
    slot.memory = words_->memory[index];
    slot.data = slot.memory.get();
  } else {
    ZB_CUDA(*runtime_, cudaIpcOpenMemHandle(&slot.opened, shared.handle, kIpcLazyEnablePeerAccess));
    slot.data = static_cast<char*>(slot.opened) + shared.offset;
  }
  slot.generation = generation;
  slot.capacity = shared.capacity;
}

void IpcOut::reach(int device) {
  int can = 0;
  if (device != device_) ZB_CUDA(*runtime_, cudaDeviceCanAccessPeer(&can, device_, device));
  if (can == 0) return;
  OnDevice scope(*runtime_, device_);
  int status = runtime_->cudaDeviceEnablePeerAccess(device, 0);
  if (status == kPeerAccessAlreadyEnabled)
    runtime_->forget();
  else
    runtime_->check(status, "cudaDeviceEnablePeerAccess");
}

bool IpcOut::fits(int index, size_t bytes) {
  Slot& slot = slots_.at(index);
  if (bytes <= slot.capacity) return true;
  adopt(index);
  if (bytes <= slot.capacity) return true;
  auto& wanted = (*words_)[index].wanted;
  if (wanted.load(std::memory_order_relaxed) < bytes) {
    wanted.store(bytes, std::memory_order_release);
    board_->ring(peer());
  }
  return false;
}

void IpcOut::send(Stream stream, int index, const Message& message) {
  Slot& slot = slots_.at(index);
  ZB_CHECK(message.payload <= slot.capacity, "a message is larger than its slot");
  LinkSlot& shared = (*words_)[index];
  if (slot.sent > 0) words_->registered().wait(stream, shared.free, slot.sent, wait_flags_);
  for (const Piece& piece : message.pieces)
    ZB_CUDA(*runtime_, cudaMemcpyAsync(slot.data + piece.offset, piece.data, piece.bytes,
                                       kMemcpyDefault, stream));
  ++slot.sent;
  words_->registered().write(stream, shared.ready, slot.sent);
}

void IpcOut::abort() {
  for (int i = 0; i < slots(); ++i) (*words_)[i].free.store(slots_[i].sent + kPast);
}

void IpcOut::collect() {
  for (Old& old : outgrown_) {
    if (old.opened != nullptr) ZB_CUDA(*runtime_, cudaIpcCloseMemHandle(old.opened));
    (*words_)[old.slot].closed.store(old.generation, std::memory_order_release);
  }
  outgrown_.clear();
}

void IpcOut::close() {
  if (closed_) return;
  OnDevice scope(*runtime_, device_);
  for (int i = 0; i < slots(); ++i) set_aside(i);
  collect();
  words_->leave();
  closed_ = true;
}

IpcIn::IpcIn(std::shared_ptr<const Runtime> runtime, std::shared_ptr<Board> board, int device,
             int peer, std::shared_ptr<LinkWords> words, bool poison)
    : InLink(peer, words->slots()),
      runtime_(std::move(runtime)),
      board_(std::move(board)),
      device_(device),
      wait_flags_(wait_flags(*runtime_, device)),
      words_(std::move(words)),
      poison_(poison),
      slots_(words_->slots()) {
  ZB_CHECK(peer >= 0 && peer < board_->ranks(), "a link's peer is not on the board");
}

IpcIn::~IpcIn() {
  if (closed_) return;
  leak(slots_);
  leak(outgrown_);
  words_->seal();
  new std::shared_ptr<LinkWords>(std::move(words_));
}

void IpcIn::serve() {
  for (int i = 0; i < slots(); ++i) {
    uint64_t wanted = (*words_)[i].wanted.load(std::memory_order_acquire);
    if (wanted > slots_[i].capacity) grow(i, wanted);
  }
}

void IpcIn::grow(int index, size_t bytes) {
  Slot& slot = slots_[index];
  ZB_CHECK(!held(index), "a slot that is in use cannot grow");
  LinkSlot& shared = (*words_)[index];
  uint32_t generation = shared.generation.load(std::memory_order_relaxed);
  uint64_t capacity = roomy(bytes);
  if (slot.memory) outgrown_.push_back({index, generation, std::move(slot.memory)});
  slot.memory = allocate(runtime_, device_, capacity);
  slot.capacity = shared.capacity = capacity;
  if (words_->local()) {
    words_->memory[index] = slot.memory;
  } else {
    auto address = reinterpret_cast<uint64_t>(slot.memory.get());
    uint64_t base = 0;
    size_t whole = 0;
    ZB_CUDA(*runtime_, cuMemGetAddressRange(&base, &whole, address));
    shared.offset = address - base;
    ZB_CUDA(*runtime_, cudaIpcGetMemHandle(&shared.handle, slot.memory.get()));
  }
  shared.generation.store(generation + 1, std::memory_order_release);
  board_->ring(peer());
}

void IpcIn::receive(Stream stream, int index, size_t bytes) {
  Slot& slot = slots_.at(index);
  ++slot.received;
  slot.bytes = bytes;
  words_->registered().wait(stream, (*words_)[index].ready, slot.received, wait_flags_);
}

void IpcIn::release(Stream stream, int index) {
  Slot& slot = slots_.at(index);
  if (!held(index)) return;
  // All ones is a NaN in every floating-point type: a late reader shows itself.
  if (poison_ && slot.bytes > 0)
    ZB_CUDA(*runtime_, cudaMemsetAsync(slot.memory.get(), 0xff, slot.bytes, stream));
  slot.released = slot.received;
  words_->registered().write(stream, (*words_)[index].free, slot.released);
}

void IpcIn::abort() {
  for (int i = 0; i < slots(); ++i) (*words_)[i].ready.store(slots_[i].received + kPast);
}

bool IpcIn::given_back(const Old& old) const {
  return words_->local() ||
         reached((*words_)[old.slot].closed.load(std::memory_order_acquire), old.generation);
}

void IpcIn::collect() {
  auto back = [this](const Old& old) { return given_back(old); };
  outgrown_.erase(std::remove_if(outgrown_.begin(), outgrown_.end(), back), outgrown_.end());
}

void IpcIn::close() {
  if (closed_) return;
  for (int i = 0; i < slots(); ++i) {
    Slot& slot = slots_[i];
    uint32_t generation = (*words_)[i].generation.load(std::memory_order_relaxed);
    if (slot.memory) outgrown_.push_back({i, generation, std::move(slot.memory)});
  }
  int64_t until = now_ns() + kCloseNs;
  for (collect(); !outgrown_.empty() && now_ns() < until; collect()) {
    timespec t = to_timespec(1'000'000);
    nanosleep(&t, nullptr);
  }
  // To free what the peer still has open is undefined (cudaIpcCloseMemHandle, CUDA runtime API): it
  // goes with this process.
  leak(outgrown_);
  words_->leave();
  closed_ = true;
}

}  // namespace zb::cuda
