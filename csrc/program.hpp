/// A Program as the executor sees it: one rank's instructions, by lane. All thinking was done when
/// it was compiled (zbpipe/program.py); here it is only checked for being well formed.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "board.hpp"
#include "sync.hpp"

namespace zb {

enum class Work : uint8_t {
  kCallback,  // Python runs the action
  kSleep,     // virtual device: the action takes `amount` ns
  kSend,      // message to `channel`, into `slot`; `amount` bytes where Python posts none
  kReceive,   // message from `channel` in `slot`
  kGraph,     // CUDA: launches the executable graph `amount` (a cudaGraphExec_t)
};

struct Instruction {
  uint32_t lane = 0;
  Work work = Work::kCallback;
  int32_t channel = -1;
  int32_t slot = -1;
  uint64_t amount = 0;
  Tag tag;
  std::vector<uint32_t> waits;  // instructions of other lanes that must have ended
  bool signals = false;         // someone waits for this one
};

struct Program {
  Program(uint32_t lanes, std::vector<Instruction> list) : instructions(std::move(list)) {
    ZB_CHECK(lanes >= 1, "a Program needs a lane");
    by_lane.resize(lanes);
    position.reserve(instructions.size());
    for (uint32_t i = 0; i < instructions.size(); ++i) {
      const Instruction& instruction = instructions[i];
      ZB_CHECK(instruction.lane < lanes, "an instruction names a lane that is not there");
      for (uint32_t w : instruction.waits) {
        ZB_CHECK(w < instructions.size(), "an instruction waits for one that is not there");
        ZB_CHECK(instructions[w].signals, "an instruction waits for one that does not signal");
      }
      position.push_back(static_cast<uint32_t>(by_lane[instruction.lane].size()));
      by_lane[instruction.lane].push_back(i);
    }
  }

  std::vector<Instruction> instructions;
  std::vector<std::vector<uint32_t>> by_lane;
  std::vector<uint32_t> position;  // of an instruction in its lane
};

}  // namespace zb
