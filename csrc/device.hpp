/// What the interpreter of Programs needs from a device: lanes in which work is ordered, events
/// between lanes, and the kinds of work that are not Python's.
///
/// On the CPU a lane is a thread and each call returns when its work is done. A device with streams
/// enqueues instead, all lanes from one thread: each call returns at once.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "program.hpp"
#include "transport/channel.hpp"

namespace zb {

struct Times {
  int64_t start = 0, end = 0;  // ns of CLOCK_MONOTONIC
};

class Device {
 public:
  virtual ~Device() = default;

  /// True when one thread drives all lanes; then the second half of this interface is used too.
  virtual bool enqueues() const { return false; }

  /// Forgets the events of the last run.
  virtual void begin(const Program& program) = 0;
  /// `by` and what follows it in its lane happen after `instruction` of another lane. False:
  /// aborted.
  virtual bool wait(const Program& program, uint32_t by, uint32_t instruction) = 0;
  /// `instruction` is over, as far as its lane is concerned.
  virtual void signal(const Program& program, uint32_t instruction) = 0;
  virtual bool sleep(uint32_t lane, int64_t ns) = 0;
  /// Launches an executable graph of the device, given as an integer.
  virtual bool graph(uint32_t lane, uint64_t exec) = 0;
  virtual bool send(const Instruction& instruction, Sender& channel, const Message& message) = 0;
  virtual bool receive(const Instruction& instruction, Receiver& channel) = 0;

  /// Makes the calling thread the one that enqueues.
  virtual void enter() {}
  /// True when the transfer would wait for nothing that is not enqueued yet, on any rank. Its waits
  /// are enqueued. False: not yet; to be asked again.
  virtual bool can_send(const Instruction&, Sender&, const Message&) { return true; }
  virtual bool can_receive(const Instruction&, Receiver&) { return true; }
  /// The waits of `instruction` are enqueued and its work comes next.
  virtual void started(const Program&, uint32_t) {}
  /// What changes when another rank has published something, to be read before looking for work.
  virtual uint32_t ticket() const { return 0; }
  /// Sleeps a moment, at most until `ticket` has changed. False: aborted.
  virtual bool pause(uint32_t) { return true; }
  /// Lets go of the run's last messages and sleeps until the device is through with the run, or,
  /// when aborted, gives up.
  virtual void finish(const Program&, std::vector<std::shared_ptr<Receiver>>&) {}
  /// The board was aborted: lets whatever waits on the device go on. Called again and again, from
  /// any thread, until the run has ended.
  virtual void interrupt() {}
  /// True when the device is through with an `instruction` that was enqueued.
  virtual bool finished(uint32_t) const { return true; }
  /// Replaces the host's times of the last run by the device's own.
  virtual void measure(std::vector<Times>&) {}
  /// Gives everything back; between runs, once.
  virtual void close() {}
};

}  // namespace zb
