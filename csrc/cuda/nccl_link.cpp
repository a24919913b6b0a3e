#include "cuda/nccl_link.hpp"

namespace zb::cuda {
namespace {

NcclId fresh_id() {
  auto nccl = Nccl::load();
  NcclId id;
  nccl->check(nccl->ncclGetUniqueId(&id), "ncclGetUniqueId");
  return id;
}

/// The communicator belongs to the device that is current when it is made.
Communicator on_device(const Runtime& runtime, int device, int peer, int rank, const NcclId& id) {
  OnDevice scope(runtime, device);
  return Communicator(Nccl::load(), peer, rank, id);
}

}  // namespace

NcclEnd::NcclEnd(std::shared_ptr<const Runtime> runtime, int device, int peer, int rank,
                 const NcclId& id)
    : runtime_(std::move(runtime)),
      device_(device),
      peer_(peer),
      rank_(rank),
      communicator_(on_device(*runtime_, device, peer, rank, id)) {
  OnDevice scope(*runtime_, device_);
  ZB_CUDA(*runtime_, cudaStreamCreateWithPriority(&stream_, kStreamNonBlocking, 0));
  byte_ = allocate(runtime_, device_, 1);
  ZB_CUDA(*runtime_, cudaMemsetAsync(byte_.get(), 0, 1, stream_));
}

/// A probe that was never over is left where it is.
NcclEnd::~NcclEnd() {
  if (byte_) new DeviceMemory(std::move(byte_));
}

bool NcclEnd::advance() {
  if (at_ == At::kConnected) return true;
  OnDevice scope(*runtime_, device_);
  if (!communicator_.settled()) return false;
  if (at_ == At::kJoining) {
    if (rank_ == 0)
      communicator_.send(byte_.get(), 1, stream_);
    else
      communicator_.receive(byte_.get(), 1, stream_);
    at_ = At::kProbing;
    return false;
  }
  if (!runtime_->done(runtime_->cudaStreamQuery(stream_), "cudaStreamQuery")) return false;
  at_ = At::kConnected;
  return true;
}

void NcclEnd::require() const {
  ZB_CHECK(at_ == At::kConnected,
           "the link to rank " + std::to_string(peer_) + " is not connected");
}

void NcclEnd::close() {
  OnDevice scope(*runtime_, device_);
  if (at_ != At::kConnected) {
    Communicator::abort({&communicator_});  // nobody may be at the other end
    return;
  }
  communicator_.close();
  ZB_CUDA(*runtime_, cudaStreamDestroy(stream_));
  byte_ = nullptr;
}

NcclOut::NcclOut(std::shared_ptr<const Runtime> runtime, int device, int peer, int slots)
    : OutLink(peer, slots),
      runtime_(std::move(runtime)),
      device_(device),
      id_(fresh_id()),
      staging_(slots) {
  end_.emplace(runtime_, device, peer, 0, id_);
}

NcclOut::~NcclOut() {
  if (closed_) return;
  leak(staging_);
  leak(outgrown_);
}

void NcclOut::send(Stream stream, int slot, const Message& message) {
  end_->require();
  if (message.payload == 0) return;
  const std::vector<Piece>& pieces = message.pieces;
  if (pieces.size() == 1 && pieces[0].bytes == message.payload) {
    end_->communicator().send(static_cast<const char*>(pieces[0].data), message.payload, stream);
    return;
  }
  Staging& staging = staging_.at(slot);
  if (staging.capacity < message.payload) {
    if (staging.memory) outgrown_.push_back(std::move(staging.memory));
    staging.capacity = roomy(message.payload);
    staging.memory = allocate(runtime_, device_, staging.capacity);
  }
  for (const Piece& piece : pieces)
    ZB_CUDA(*runtime_, cudaMemcpyAsync(staging.memory.get() + piece.offset, piece.data, piece.bytes,
                                       kMemcpyDefault, stream));
  end_->communicator().send(staging.memory.get(), message.payload, stream);
}

void NcclOut::close() {
  if (closed_) return;
  end_->close();
  staging_.clear();
  outgrown_.clear();
  closed_ = true;
}

NcclIn::NcclIn(std::shared_ptr<const Runtime> runtime, int device, int peer, int slots,
               const NcclId& id, bool poison)
    : InLink(peer, slots),
      runtime_(runtime),
      device_(device),
      end_(std::move(runtime), device, peer, 1, id),
      poison_(poison),
      slots_(slots) {}

NcclIn::~NcclIn() {
  if (closed_) return;
  leak(slots_);
  leak(outgrown_);
}

void NcclIn::receive(Stream stream, int index, size_t bytes) {
  end_.require();
  Slot& slot = slots_.at(index);
  slot.held = true;
  slot.bytes = bytes;
  if (slot.capacity < bytes) {
    // What was enqueued may still read the old memory.
    if (slot.memory) outgrown_.push_back(std::move(slot.memory));
    slot.capacity = roomy(bytes);
    slot.memory = allocate(runtime_, device_, slot.capacity);
  }
  if (bytes > 0) end_.communicator().receive(slot.memory.get(), bytes, stream);
}

void NcclIn::release(Stream stream, int index) {
  Slot& slot = slots_.at(index);
  // All ones is a NaN in every floating-point type: a late reader shows itself.
  if (slot.held && poison_ && slot.bytes > 0)
    ZB_CUDA(*runtime_, cudaMemsetAsync(slot.memory.get(), 0xff, slot.bytes, stream));
  slot.held = false;
}

void NcclIn::close() {
  if (closed_) return;
  end_.close();
  slots_.clear();
  outgrown_.clear();
  closed_ = true;
}

}  // namespace zb::cuda
