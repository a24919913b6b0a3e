/// The CUDA runtime, found and loaded while the program runs: one extension serves the CPU, CUDA 12
/// and CUDA 13.
#pragma once

#include <memory>
#include <string>

#include "cuda/functions.hpp"

namespace zb::cuda {

/// The loaded functions. The libraries stay loaded for good: the runtime has threads and exit
/// handlers of its own, and torch may use it too.
class Runtime {
 public:
  /// Loads $ZBPIPE_CUDART, else libcudart.so.13, else .12, of these first what is loaded already;
  /// the driver's functions come from the same library if it has them, else from libcuda.so.1.
  /// Throws with what was tried and why it failed.
  static std::shared_ptr<const Runtime> load();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

#define ZB_MEMBER(name, ...) int (*name)(__VA_ARGS__) = nullptr;
  ZB_CUDA_RUNTIME(ZB_MEMBER)
#undef ZB_MEMBER
#define ZB_MEMBER(name, symbol, ...) int (*name)(__VA_ARGS__) = nullptr;
  ZB_CUDA_DRIVER(ZB_MEMBER)
#undef ZB_MEMBER
#define ZB_MEMBER(name, symbol, ...) void (*name)(__VA_ARGS__) = nullptr;
  ZB_CUDA_TOLD(ZB_MEMBER)
#undef ZB_MEMBER

  /// Throws unless `status` is success, with the call's text and CUDA's name for the error.
  void check(int status, const char* call) const;
  /// Clears the thread's last error, which torch would take for its own.
  void forget() const;
  /// True when done, false when not ready; throws on any other status.
  bool done(int status, const char* call) const;
  /// Path or name of the runtime library.
  const std::string& library() const { return library_; }

 private:
  Runtime() = default;
  bool open(const std::string& name, int flags, std::string& tried);
  void resolve();

  void* runtime_ = nullptr;
  void* driver_ = nullptr;
  std::string library_;
  const char* (*error_string_)(int) = nullptr;
};

#define ZB_CUDA(runtime, call) (runtime).check((runtime).call, #call)

/// Makes `device` the thread's current one, and the former one again at the end of the scope.
class OnDevice {
 public:
  OnDevice(const Runtime& runtime, int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  const Runtime& runtime_;
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace zb::cuda
