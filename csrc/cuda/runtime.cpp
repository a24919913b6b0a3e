#include "cuda/runtime.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>
#include <vector>

namespace zb::cuda {
namespace {

template <class Function>
void find(Function& function, void* library, const char* symbol) {
  function = library == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library, symbol));
}

std::string last_error() {
  const char* error = dlerror();
  return error == nullptr ? "unknown error" : error;
}

}  // namespace

std::shared_ptr<const Runtime> Runtime::load() {
  std::vector<std::string> names = {"libcudart.so.13", "libcudart.so.12"};
  const char* given = std::getenv("ZBPIPE_CUDART");
  if (given != nullptr && *given != 0) names = {given};
  std::shared_ptr<Runtime> runtime(new Runtime());
  std::string tried;
  // First what torch has loaded already: two runtimes in one process would be two sets of defaults,
  // and the other one may be newer than the driver.
  for (int extra : {RTLD_NOLOAD, 0}) {
    for (const std::string& name : names) {
      if (!runtime->open(name, extra, tried)) continue;
      runtime->resolve();
      return runtime;
    }
  }
  throw std::runtime_error(
      "no CUDA runtime could be loaded: install CUDA 12 or 13, or set ZBPIPE_CUDART to the path of "
      "libcudart.so (tried:" +
      tried + ")");
}

bool Runtime::open(const std::string& name, int flags, std::string& tried) {
  runtime_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | flags);
  if (runtime_ == nullptr) {
    if (flags == 0) tried += " " + last_error() + ";";
    return false;
  }
  library_ = name;
  return true;
}

void Runtime::resolve() {
  std::string missing;
#define ZB_FIND(name, ...)           \
  find(this->name, runtime_, #name); \
  if (this->name == nullptr) missing += " " #name;
  ZB_CUDA_RUNTIME(ZB_FIND)
#undef ZB_FIND
  find(error_string_, runtime_, "cudaGetErrorString");
  find(cuStreamWaitValue32, runtime_, "cuStreamWaitValue32_v2");
  if (cuStreamWaitValue32 == nullptr) driver_ = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  void* from = cuStreamWaitValue32 == nullptr ? driver_ : runtime_;
#define ZB_FIND(name, symbol, ...) find(this->name, from, symbol);
  ZB_CUDA_DRIVER(ZB_FIND)
#undef ZB_FIND
#define ZB_FIND(name, symbol, ...) find(this->name, runtime_, symbol);
  ZB_CUDA_TOLD(ZB_FIND)
#undef ZB_FIND
  if (!missing.empty())
    throw std::runtime_error(library_ + " lacks functions of the CUDA runtime:" + missing);
}

void Runtime::check(int status, const char* call) const {
  if (status == kSuccess) return;
  forget();
  std::string what = error_string_ == nullptr ? "" : std::string(": ") + error_string_(status);
  throw std::runtime_error("CUDA error " + std::to_string(status) + what + " in " + call);
}

bool Runtime::done(int status, const char* call) const {
  if (status == kNotReady) {
    forget();
    return false;
  }
  check(status, call);
  return true;
}

// Whoever launches a kernel in this thread next asks for the last error, and must not find ours.
void Runtime::forget() const { (void)cudaGetLastError(); }

OnDevice::OnDevice(const Runtime& runtime, int device) : runtime_(runtime) {
  ZB_CUDA(runtime_, cudaGetDevice(&before_));
  if (before_ == device) return;
  ZB_CUDA(runtime_, cudaSetDevice(device));
  changed_ = true;
}

OnDevice::~OnDevice() {
  // The former device was current before: it can be made so again, and a destructor cannot throw.
  if (changed_) (void)runtime_.cudaSetDevice(before_);
}

}  // namespace zb::cuda
