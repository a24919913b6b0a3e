#include "cpu/cpu_device.hpp"

#include <algorithm>

namespace zb {
CpuDevice::CpuDevice(std::shared_ptr<Board> board) : board_(std::move(board)) {
  await_ = [this](const Word& word, uint32_t value) { return await(word, value); };
}

void CpuDevice::begin(const Program& program) {
  while (lanes_.size() < program.by_lane.size()) lanes_.push_back(std::make_unique<Counter>());
  for (auto& lane : lanes_) lane->finished.store(0, std::memory_order_relaxed);
}

bool CpuDevice::await(const Word& word, uint32_t value) const {
  for (uint32_t seen = word.load(std::memory_order_acquire); !reached(seen, value);
       seen = word.load(std::memory_order_acquire)) {
    if (board_->aborted()) return false;
    futex_wait(word, seen, kSliceNs);
  }
  return !board_->aborted();
}

bool CpuDevice::wait(const Program& program, uint32_t, uint32_t instruction) {
  uint32_t lane = program.instructions[instruction].lane;
  return await(lanes_[lane]->finished, program.position[instruction] + 1);
}

void CpuDevice::signal(const Program& program, uint32_t instruction) {
  Word& word = lanes_[program.instructions[instruction].lane]->finished;
  word.store(program.position[instruction] + 1, std::memory_order_release);
  if (program.instructions[instruction].signals) futex_wake(word);
}

bool CpuDevice::sleep(uint32_t, int64_t ns) {
  int64_t end = now_ns() + ns;
  for (int64_t left = ns; left > 0; left = end - now_ns()) {
    if (board_->aborted()) return false;
    timespec t = to_timespec(std::min(left, kSliceNs));
    nanosleep(&t, nullptr);
  }
  return !board_->aborted();
}

bool CpuDevice::graph(uint32_t, uint64_t) {
  throw std::runtime_error("the CPU launches no graphs: this instruction is for CUDA");
}

bool CpuDevice::send(const Instruction& instruction, Sender& channel, const Message& message) {
  return channel.send(instruction.slot, message, await_);
}

bool CpuDevice::receive(const Instruction& instruction, Receiver& channel) {
  return channel.receive(instruction.slot, await_);
}

}  // namespace zb
