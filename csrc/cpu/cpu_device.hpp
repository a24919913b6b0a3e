/// The CPU as a Device: events are counters of finished instructions, one a lane.
#pragma once

#include <memory>
#include <vector>

#include "board.hpp"
#include "device.hpp"

namespace zb {

class CpuDevice : public Device {
 public:
  explicit CpuDevice(std::shared_ptr<Board> board);

  void begin(const Program& program) override;
  bool wait(const Program& program, uint32_t by, uint32_t instruction) override;
  void signal(const Program& program, uint32_t instruction) override;
  bool sleep(uint32_t lane, int64_t ns) override;
  bool graph(uint32_t lane, uint64_t exec) override;
  bool send(const Instruction& instruction, Sender& channel, const Message& message) override;
  bool receive(const Instruction& instruction, Receiver& channel) override;

 private:
  struct alignas(64) Counter {
    Word finished{0};
  };
  /// Sleeps until `word` reaches `value`; false when the board was aborted.
  bool await(const Word& word, uint32_t value) const;

  std::shared_ptr<Board> board_;
  Wait await_;
  std::vector<std::unique_ptr<Counter>> lanes_;
};

}  // namespace zb
