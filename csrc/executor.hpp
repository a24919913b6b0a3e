/// The persistent executor of one rank: lanes that stay, and one interpreter of Programs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "board.hpp"
#include "device.hpp"
#include "program.hpp"
#include "transport/channel.hpp"

namespace zb {

/// Runs a callback instruction. Returns false when it failed and the board has been told.
using Callback = std::function<bool(uint32_t instruction)>;
/// Called once in a lane's thread before the first and after the last callback it runs.
using ThreadHook = std::function<void(bool starting)>;

struct Times {
  int64_t start = 0, end = 0;  // ns of CLOCK_MONOTONIC
};

class Executor {
 public:
  /// `poison` fills every slot with NaN when it is let go of.
  Executor(std::shared_ptr<Board> board, int rank, int64_t timeout_ns, ThreadHook hook);
  /// Stops the lanes. One that is stuck in a callback is left behind, never joined.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// Channels are named by their position; call between runs.
  int add(std::shared_ptr<Sender> sender);
  int add(std::shared_ptr<Receiver> receiver);

  /// Begins a run in the lanes' threads. The last run must have ended.
  void start(std::shared_ptr<const Program> program, Callback callback);
  /// Sleeps until the run has ended, at most `ns`. True when it has.
  bool join(int64_t ns);
  /// Leaves the message of a send instruction for its lane; called from the callback it waits for.
  void post(uint32_t instruction, Message message);

  /// True when `instruction` of the current run is over.
  bool finished(uint32_t instruction) const;
  const std::vector<Times>& times() const;
  const Receiver& receiver(int channel) const;
  void stop();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace zb
