#include "cuda/registered.hpp"

namespace zb::cuda {

unsigned wait_flags(const Runtime& runtime, int device) {
  int flush = 0;
  if (runtime.cuDeviceGetAttribute(&flush, kCanFlushRemoteWrites, device) != kSuccess) flush = 0;
  return kWaitValueGeq | (flush != 0 ? kWaitValueFlush : 0U);
}

Registered::Registered(std::shared_ptr<const Runtime> runtime, const File& file, size_t bytes)
    : runtime_(std::move(runtime)), map_(file, 0, bytes) {
  ZB_CUDA(*runtime_, cudaHostRegister(map_.data(), map_.size(), kHostRegisterPortableMapped));
  void* device = nullptr;
  int status = runtime_->cudaHostGetDevicePointer(&device, map_.data(), 0);
  if (status != kSuccess) (void)runtime_->cudaHostUnregister(map_.data());
  runtime_->check(status, "cudaHostGetDevicePointer");
  device_ = reinterpret_cast<uint64_t>(device);
}

Registered::~Registered() {
  // A destructor cannot throw; what fails here also fails wherever the device is used next.
  if (registered_) (void)runtime_->cudaHostUnregister(map_.data());
}

void Registered::give_back() {
  if (!registered_) return;
  registered_ = false;
  ZB_CUDA(*runtime_, cudaHostUnregister(map_.data()));
}

uint64_t Registered::device(const Word& word) const {
  return device_ + static_cast<uint64_t>(reinterpret_cast<const char*>(&word) - map_.data());
}

void Registered::wait(Stream stream, const Word& word, uint32_t value, unsigned flags) const {
  ZB_CUDA(*runtime_, cuStreamWaitValue32(stream, device(word), value, flags));
}

void Registered::write(Stream stream, const Word& word, uint32_t value) const {
  ZB_CUDA(*runtime_, cuStreamWriteValue32(stream, device(word), value, kWriteValueDefault));
}

bool Registered::seen(const Word& word, uint32_t value) const {
  if (!reached(word.load(std::memory_order_acquire), value)) return false;
  if (runtime_->host_saw != nullptr) runtime_->host_saw(&word, value);
  return true;
}

void Registered::set(Word& word, uint32_t value) const {
  if (runtime_->host_sets != nullptr) runtime_->host_sets(&word, value);
  word.store(value, std::memory_order_release);
}

void Registered::use(const void* at, size_t bytes, bool write) const {
  if (runtime_->host_uses != nullptr) runtime_->host_uses(at, bytes, write ? 1 : 0);
}

bool Registered::taken(const Word& word, uint32_t value, const void* at) const {
  if (!reached(word.load(std::memory_order_acquire), value)) return false;
  if (runtime_->host_takes != nullptr) runtime_->host_takes(&word, value, at);
  return true;
}

}  // namespace zb::cuda
