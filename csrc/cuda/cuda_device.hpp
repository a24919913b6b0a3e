/// A CUDA device as a Device: lanes are streams, signals are events, and everything is enqueued by
/// one thread, which never waits for the device before the run is wholly enqueued.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "board.hpp"
#include "cuda/link.hpp"
#include "cuda/runtime.hpp"
#include "device.hpp"

namespace zb::cuda {

class CudaDevice : public Device {
 public:
  /// For `rank`, on the device numbered `ordinal` in this process. Throws where there is none, or
  /// where it has no stream memory operations.
  CudaDevice(std::shared_ptr<Board> board, int rank, int ordinal);
  /// Leaks what is on the device unless closed: streams may still use it.
  ~CudaDevice() override;

  /// Links are numbered as the channels they belong to; call between runs.
  void add(std::shared_ptr<OutLink> link);
  void add(std::shared_ptr<InLink> link);
  /// The lane's stream. Lane 0 computes; the others have the highest priority there is.
  Stream stream(uint32_t lane);
  /// The next run begins after what is in `stream` now.
  void after(Stream stream);
  /// The device's memory of the message in `slot`.
  char* payload(int channel, int slot) const { return in_.at(channel)->payload(slot); }
  const Runtime& runtime() const { return *runtime_; }

  bool enqueues() const override { return true; }
  void begin(const Program& program) override;
  bool wait(const Program& program, uint32_t by, uint32_t instruction) override;
  void signal(const Program& program, uint32_t instruction) override;
  bool sleep(uint32_t lane, int64_t ns) override;
  bool graph(uint32_t lane, uint64_t exec) override;
  bool send(const Instruction& instruction, Sender& channel, const Message& message) override;
  bool receive(const Instruction& instruction, Receiver& channel) override;
  void enter() override;
  bool can_send(const Instruction& instruction, Sender& channel, const Message& message) override;
  bool can_receive(const Instruction& instruction, Receiver& channel) override;
  void started(const Program& program, uint32_t instruction) override;
  uint32_t ticket() const override;
  bool pause(uint32_t ticket) override;
  void finish(const Program& program, std::vector<std::shared_ptr<Receiver>>& receivers) override;
  void interrupt() override;
  bool finished(uint32_t instruction) const override;
  void measure(std::vector<Times>& times) override;
  void close() override;

 private:
  struct Sleep {
    int64_t ns;
    const Board* board;
  };
  void check(const Program& program) const;
  Event event();
  bool over(Event event) const;
  void release(Stream stream, InLink& link, Receiver& channel, int slot);
  void release_all(const Program& program, std::vector<std::shared_ptr<Receiver>>& receivers);
  void serve();
  void progress();
  bool idle() const;
  void drain();
  bool drained_after_abort();
  void mark();
  void give_back();

  std::shared_ptr<const Runtime> runtime_;
  std::shared_ptr<Board> board_;
  int rank_, ordinal_;
  int low_ = 0, high_ = 0;  // stream priorities
  std::vector<std::shared_ptr<OutLink>> out_;
  std::vector<std::shared_ptr<InLink>> in_;
  std::vector<Stream> streams_;
  std::vector<Event> starts_, ends_;  // by instruction
  std::vector<Event> befores_;        // the first `before_` of them: what the next run comes after
  size_t before_ = 0;
  Event mark_ = nullptr;  // recorded when a run was over, at `marked_`
  Event spare_ = nullptr;
  int64_t marked_ = 0;
  DeviceMemory scratch_;  // payload of messages that nobody posts
  size_t scratch_bytes_ = 0;
  std::vector<DeviceMemory> old_scratch_;
  bool lost_ = false;  // streams did not drain: nothing of the device may be given back

  // One run.
  const Program* program_ = nullptr;
  std::deque<Sleep> sleeps_;
  size_t enqueued_ = 0;  // of the compute lane
  size_t cursor_ = 0;    // of these, over on the device
  bool running_ = false;
};

}  // namespace zb::cuda
