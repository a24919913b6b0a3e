/// Links across hosts: payloads go by NCCL, in the streams of the two ends. Not yet run on a GPU.
///
/// A send and its receive wait for each other on the device. The header is published when the send
/// has been enqueued, and whoever sees it enqueues the receive; so each waits for the other's
/// stream to get there, which it does if no two lanes of a rank share a hardware queue (Crew checks
/// that there are enough).
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "board.hpp"
#include "cuda/link.hpp"
#include "cuda/nccl.hpp"
#include "cuda/runtime.hpp"

namespace zb::cuda {

/// One end's communicator until it is connected. A transfer sets a connection up on both hosts, so
/// one byte is sent before the first step: in a step nothing waits on the host.
class NcclEnd {
 public:
  NcclEnd(std::shared_ptr<const Runtime> runtime, int device, int peer, int rank, const NcclId& id);
  ~NcclEnd();
  NcclEnd(const NcclEnd&) = delete;
  NcclEnd& operator=(const NcclEnd&) = delete;

  /// One step of the connection; true when it is there. Call until then, on both ends.
  bool advance();
  Communicator& communicator() { return communicator_; }
  /// Throws unless it is connected.
  void require() const;
  /// Throws where the connection has failed.
  void watch() { communicator_.watch(); }
  void close();

 private:
  enum class At { kJoining, kProbing, kConnected };
  std::shared_ptr<const Runtime> runtime_;
  int device_, peer_, rank_;
  Communicator communicator_;
  At at_ = At::kJoining;
  // The probe's. Made before any probe is under way and given back when the link is closed: to free
  // memory waits for the whole device, other links' probes among it.
  Stream stream_ = nullptr;
  DeviceMemory byte_;
};

class NcclOut : public OutLink {
 public:
  NcclOut(std::shared_ptr<const Runtime> runtime, int device, int peer, int slots);
  /// Leaks what is on the device unless closed: streams may still use it.
  ~NcclOut() override;

  /// For the other end.
  const NcclId& id() const { return id_; }
  bool advance() { return end_->advance(); }
  /// Sends one piece from where it lies; several are first copied together.
  void send(Stream stream, int slot, const Message& message) override;
  void serve() override { end_->watch(); }
  Communicator* communicator() override { return &end_->communicator(); }
  void collect() override { outgrown_.clear(); }
  void close() override;

 private:
  struct Staging {
    DeviceMemory memory;
    size_t capacity = 0;
  };
  std::shared_ptr<const Runtime> runtime_;
  int device_;
  NcclId id_;
  std::optional<NcclEnd> end_;
  std::vector<Staging> staging_;  // by slot
  std::vector<DeviceMemory> outgrown_;
  bool closed_ = false;
};

class NcclIn : public InLink {
 public:
  NcclIn(std::shared_ptr<const Runtime> runtime, int device, int peer, int slots, const NcclId& id,
         bool poison);
  ~NcclIn() override;

  bool advance() { return end_.advance(); }
  void serve() override { end_.watch(); }
  void receive(Stream stream, int slot, size_t bytes) override;
  bool held(int slot) const override { return slots_.at(slot).held; }
  void release(Stream stream, int slot) override;
  char* payload(int slot) const override { return slots_.at(slot).memory.get(); }
  Communicator* communicator() override { return &end_.communicator(); }
  void collect() override { outgrown_.clear(); }
  void close() override;

 private:
  struct Slot {
    DeviceMemory memory;
    size_t capacity = 0, bytes = 0;
    bool held = false;
  };
  std::shared_ptr<const Runtime> runtime_;
  int device_;
  NcclEnd end_;
  bool poison_;
  std::vector<Slot> slots_;
  std::vector<DeviceMemory> outgrown_;
  bool closed_ = false;
};

}  // namespace zb::cuda
