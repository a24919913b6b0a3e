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

/// Lanes leave their waits within a slice; what takes much longer sits in a callback.
constexpr int64_t kHaltNs = 10 * kSliceNs;

class Executor {
 public:
  /// `timeout_ns` without progress on any rank is an error (see `supervise`). Runs on `device`, or
  /// on the CPU where that is null.
  Executor(std::shared_ptr<Board> board, int rank, int64_t timeout_ns, ThreadHook hook,
           std::shared_ptr<Device> device = nullptr);
  /// Halts. A lane that is stuck in a callback is left behind, never joined.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// Channels are named by their position; call between runs.
  int add(std::shared_ptr<Sender> sender);
  int add(std::shared_ptr<Receiver> receiver);

  /// Begins a run in the lanes' threads. The last run must have ended. Whoever waits for the run
  /// must call `supervise` meanwhile: lanes only look for an abort.
  void start(std::shared_ptr<const Program> program, Callback callback);
  /// Sleeps until the run has ended, at most `ns`. True when it has; then nothing of the run's
  /// callback is kept, and every received message has been let go of.
  bool join(int64_t ns);
  /// Looks for dead and stalled ranks on behalf of a run that has not ended. True when aborted.
  bool supervise();
  /// Leaves the message of a send instruction for its lane; called from the callback it waits for.
  void post(uint32_t instruction, Message message);

  /// True when `instruction` of the current run is over.
  bool finished(uint32_t instruction) const;
  /// Of the last run's instructions; by the device's clock where it has one.
  const std::vector<Times>& times() const;
  const Receiver& receiver(int channel) const;
  /// Ends the lanes, and with the last of them the channels. Waits at most `ns`, then returns
  /// false, since a lane sits in a callback: call again, or `abandon` it.
  bool halt(int64_t ns);
  /// Leaves lanes that have not ended to themselves; they touch no other rank's memory any more.
  void abandon();

 private:
  struct State;
  bool join_lanes(int64_t until);
  std::shared_ptr<State> state_;
};

}  // namespace zb
