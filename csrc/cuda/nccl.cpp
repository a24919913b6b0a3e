#include "cuda/nccl.hpp"

#include <dlfcn.h>
#include <string.h>
#include <time.h>

#include <climits>
#include <cstdlib>
#include <stdexcept>
#include <utility>
#include <vector>

#include "sync.hpp"

namespace zb::cuda {
namespace {

// How long a call that is normally enqueued at once may be in progress: the network may have to set
// something up.
constexpr int64_t kSettleNs = 10'000'000'000;
// How long the last messages may take to leave when a communicator is closed.
constexpr int64_t kFlushNs = 2'000'000'000;
constexpr int64_t kNapNs = 50'000;

void nap() {
  timespec t = to_timespec(kNapNs);
  nanosleep(&t, nullptr);
}

std::string last_error() {
  const char* error = dlerror();
  return error == nullptr ? "unknown error" : error;
}

}  // namespace

std::shared_ptr<const Nccl> Nccl::load() {
  const char* blocking = std::getenv("NCCL_COMM_BLOCKING");
  if (blocking != nullptr && strcmp(blocking, "1") == 0)
    throw std::runtime_error(
        "NCCL_COMM_BLOCKING = 1: every call of NCCL would wait for the peer; unset it");
  const char* given = std::getenv("ZBPIPE_NCCL");
  std::shared_ptr<Nccl> nccl(new Nccl());
  nccl->library_ = given != nullptr && *given != 0 ? given : "libnccl.so.2";
  // First what torch has loaded already: it lies where only torch's own search path leads.
  for (int extra : {RTLD_NOLOAD, 0})
    if (nccl->handle_ == nullptr)
      nccl->handle_ = dlopen(nccl->library_.c_str(), RTLD_NOW | RTLD_LOCAL | extra);
  if (nccl->handle_ == nullptr)
    throw std::runtime_error(
        "NCCL could not be loaded: install a torch built for CUDA, which brings it, or set "
        "ZBPIPE_NCCL to the path of libnccl.so.2 (" +
        last_error() + ")");
  nccl->resolve();
  return nccl;
}

void Nccl::resolve() {
  std::string missing;
#define ZB_FIND(name, ...)                                                    \
  this->name = reinterpret_cast<decltype(this->name)>(dlsym(handle_, #name)); \
  if (this->name == nullptr) missing += " " #name;
  ZB_NCCL(ZB_FIND)
#undef ZB_FIND
  error_string_ = reinterpret_cast<decltype(error_string_)>(dlsym(handle_, "ncclGetErrorString"));
  if (ncclGetVersion != nullptr) check(ncclGetVersion(&version_), "ncclGetVersion");
  if (!missing.empty() || version_ < static_cast<int>(kNcclConfigVersion))
    throw std::runtime_error(library_ + " is NCCL " + std::to_string(version_) +
                             ": want 2.17 or newer" +
                             (missing.empty() ? "" : "; it lacks" + missing));
}

void Nccl::check(int status, const std::string& call) const {
  if (status == kNcclSuccess || status == kNcclInProgress) return;
  std::string what = error_string_ == nullptr ? "" : std::string(": ") + error_string_(status);
  throw std::runtime_error("NCCL error " + std::to_string(status) + what + " in " + call);
}

Communicator::Communicator(std::shared_ptr<const Nccl> nccl, int peer, int rank, const NcclId& id)
    : nccl_(std::move(nccl)), peer_(peer), rank_(rank), comm_(new NcclComm(nullptr)) {
  NcclConfig config{sizeof(NcclConfig),
                    kNcclConfigMagic,
                    kNcclConfigVersion,
                    0,
                    INT_MIN,
                    INT_MIN,
                    INT_MIN,
                    nullptr};
  check(nccl_->ncclCommInitRankConfig(comm_, 2, id, rank, &config), "ncclCommInitRankConfig");
}

Communicator::~Communicator() = default;

void Communicator::check(int status, const char* call) const {
  nccl_->check(status, std::string(call) + ", between this rank and rank " + std::to_string(peer_));
}

NcclComm Communicator::get() const {
  if (comm_ == nullptr)
    throw std::runtime_error("the NCCL connection to rank " + std::to_string(peer_) + " is closed");
  return *comm_;
}

bool Communicator::settled_locked() {
  int state = kNcclSuccess;
  check(nccl_->ncclCommGetAsyncError(get(), &state), "ncclCommGetAsyncError");
  check(state, "a transfer");
  return state == kNcclSuccess;
}

bool Communicator::settled() {
  std::lock_guard<std::mutex> guard(mutex_);
  return settled_locked();
}

void Communicator::watch() {
  std::lock_guard<std::mutex> guard(mutex_);
  if (comm_ != nullptr) settled_locked();
}

/// The next call may only be made when this one is over. On a connection that stands that is in a
/// moment; to set it up takes the other end.
void Communicator::after(int status, const char* call) {
  check(status, call);
  bool sets_up = !std::exchange(used_, true);
  if (status == kNcclSuccess || sets_up) return;
  int64_t until = now_ns() + kSettleNs;
  while (!settled()) {
    if (now_ns() > until)
      throw std::runtime_error(std::string(call) + " to rank " + std::to_string(peer_) +
                               " is in progress for too long");
    nap();
  }
}

void Communicator::send(const char* data, size_t bytes, Stream stream) {
  int status = kNcclSuccess;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    status = nccl_->ncclSend(data, bytes, kNcclUint8, 1 - rank_, get(), stream);
  }
  after(status, "ncclSend");
}

void Communicator::receive(char* data, size_t bytes, Stream stream) {
  int status = kNcclSuccess;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    status = nccl_->ncclRecv(data, bytes, kNcclUint8, 1 - rank_, get(), stream);
  }
  after(status, "ncclRecv");
}

void Communicator::abort(const std::vector<Communicator*>& all) {
  std::vector<std::unique_lock<std::mutex>> held;
  std::vector<Communicator*> live;
  for (Communicator* one : all) {
    std::unique_lock<std::mutex> lock(one->mutex_);
    if (one->comm_ == nullptr) continue;
    held.push_back(std::move(lock));
    live.push_back(one);
  }
  if (live.empty()) return;
  // What these return changes nothing: the communicators are gone either way.
  const Nccl& nccl = *live.front()->nccl_;
  (void)nccl.ncclGroupStart();
  for (Communicator* one : live) (void)nccl.ncclCommAbort(*one->comm_);
  (void)nccl.ncclGroupEnd();
  for (Communicator* one : live) delete std::exchange(one->comm_, nullptr);
}

void Communicator::close() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (comm_ == nullptr) return;
    // A send is over on the device before the network has the message: to abort would lose it.
    int status = nccl_->ncclCommFinalize(*comm_);
    int64_t until = now_ns() + kFlushNs;
    while (status == kNcclInProgress && now_ns() < until) {
      nap();
      if (nccl_->ncclCommGetAsyncError(*comm_, &status) != kNcclSuccess) break;
    }
    if (status == kNcclSuccess) {
      (void)nccl_->ncclCommDestroy(*comm_);
      delete std::exchange(comm_, nullptr);
    }
  }
  abort({this});
}

}  // namespace zb::cuda
