#include "cuda/link.hpp"

namespace zb::cuda {

DeviceMemory allocate(const std::shared_ptr<const Runtime>& runtime, int device, size_t bytes) {
  OnDevice scope(*runtime, device);
  void* data = nullptr;
  ZB_CUDA(*runtime, cudaMalloc(&data, bytes));
  return DeviceMemory(static_cast<char*>(data), [runtime, device](char* p) {
    // A destructor cannot throw; what fails here also fails wherever the device is used next.
    int before = 0;
    (void)runtime->cudaGetDevice(&before);
    (void)runtime->cudaSetDevice(device);
    (void)runtime->cudaFree(p);
    (void)runtime->cudaSetDevice(before);
  });
}

size_t roomy(size_t bytes, size_t least) {
  size_t capacity = least;
  while (capacity < bytes) capacity *= 2;
  return capacity;
}

}  // namespace zb::cuda
