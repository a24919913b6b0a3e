/// What the interpreter of Programs needs from a device: lanes in which work is ordered, events
/// between lanes, and the three kinds of work that are not Python's.
///
/// On the CPU a lane is a thread and each call returns when its work is done. A device with streams
/// enqueues instead, all lanes from one thread.
#pragma once

#include <cstdint>

#include "program.hpp"
#include "transport/channel.hpp"

namespace zb {

class Device {
 public:
  virtual ~Device() = default;

  /// Forgets the events of the last run.
  virtual void begin(const Program& program) = 0;
  /// What follows in this lane happens after `instruction` of another lane. False: aborted.
  virtual bool wait(const Program& program, uint32_t instruction) = 0;
  /// `instruction` is over, as far as this lane is concerned.
  virtual void signal(const Program& program, uint32_t instruction) = 0;
  virtual bool sleep(int64_t ns) = 0;
  virtual bool send(Sender& channel, int slot, const Message& message) = 0;
  virtual bool receive(Receiver& channel, int slot) = 0;
};

}  // namespace zb
