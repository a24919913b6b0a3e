#include "cuda/cuda_device.hpp"

#include <algorithm>

#include "cuda/nccl.hpp"

namespace zb::cuda {
namespace {

// Between two looks at the device while a run drains: its end is seen this late, at most.
constexpr int64_t kNapNs = 20'000;
// Between two looks while other ranks' hosts are waited for; they ring when they have something.
constexpr int64_t kPauseNs = 1'000'000;
// Looks at the device's clock after a run: one is late by a whole time slice now and then.
constexpr int kLooks = 4;
// After an abort, how long streams have to run out once every flag they may wait for is written.
constexpr int64_t kDrainNs = 1'500'000'000;

}  // namespace

CudaDevice::CudaDevice(std::shared_ptr<Board> board, int rank, int ordinal)
    : runtime_(Runtime::load()), board_(std::move(board)), rank_(rank), ordinal_(ordinal) {
  int count = 0;
  ZB_CUDA(*runtime_, cudaGetDeviceCount(&count));
  ZB_CHECK(ordinal >= 0 && ordinal < count, "there is no CUDA device " + std::to_string(ordinal) +
                                                ": this process sees " + std::to_string(count));
  ZB_CHECK(runtime_->cuStreamWaitValue32 != nullptr && runtime_->cuStreamWriteValue32 != nullptr &&
               runtime_->cuMemGetAddressRange != nullptr &&
               runtime_->cuDeviceGetAttribute != nullptr,
           "the CUDA driver has no stream memory operations: it must be of CUDA 12 or newer");
  OnDevice scope(*runtime_, ordinal_);
  ZB_CUDA(*runtime_, cudaDeviceGetStreamPriorityRange(&low_, &high_));
  mark_ = event();
  spare_ = event();
}

CudaDevice::~CudaDevice() {
  if (scratch_) new DeviceMemory(std::move(scratch_));
  if (!old_scratch_.empty()) new std::vector<DeviceMemory>(std::move(old_scratch_));
  if (sleeps_.empty()) return;
  new std::deque<Sleep>(std::move(sleeps_));
  new std::shared_ptr<Board>(std::move(board_));
}

void CudaDevice::add(std::shared_ptr<OutLink> link) { out_.push_back(std::move(link)); }
void CudaDevice::add(std::shared_ptr<InLink> link) { in_.push_back(std::move(link)); }

Event CudaDevice::event() {
  Event made = nullptr;
  ZB_CUDA(*runtime_, cudaEventCreateWithFlags(&made, 0));
  return made;
}

Stream CudaDevice::stream(uint32_t lane) {
  OnDevice scope(*runtime_, ordinal_);
  while (streams_.size() <= lane) {
    Stream made = nullptr;
    int priority = streams_.empty() ? low_ : high_;
    ZB_CUDA(*runtime_, cudaStreamCreateWithPriority(&made, kStreamNonBlocking, priority));
    streams_.push_back(made);
  }
  return streams_[lane];
}

void CudaDevice::after(Stream stream) {
  OnDevice scope(*runtime_, ordinal_);
  if (befores_.size() == before_) befores_.push_back(event());
  ZB_CUDA(*runtime_, cudaEventRecord(befores_[before_], stream));
  ++before_;
}

void CudaDevice::check(const Program& program) const {
  for (const Instruction& i : program.instructions) {
    auto channel = static_cast<size_t>(i.channel);
    if (i.work == Work::kSend)
      ZB_CHECK(channel < out_.size() && i.slot < out_[channel]->slots(),
               "a send names a link or a slot that is not there");
    if (i.work == Work::kReceive)
      ZB_CHECK(channel < in_.size() && i.slot < in_[channel]->slots(),
               "a receive names a link or a slot that is not there");
  }
}

void CudaDevice::begin(const Program& program) {
  ZB_CHECK(!lost_, "the device did not come to rest after an error: this pipeline is spent");
  check(program);
  OnDevice scope(*runtime_, ordinal_);
  for (auto& link : out_) link->collect();
  for (auto& link : in_) link->collect();
  old_scratch_.clear();
  sleeps_.clear();
  stream(static_cast<uint32_t>(program.by_lane.size()) - 1);
  for (size_t i = 0; i < before_; ++i)
    for (Stream lane : streams_) ZB_CUDA(*runtime_, cudaStreamWaitEvent(lane, befores_[i], 0));
  before_ = 0;
  while (starts_.size() < program.instructions.size()) starts_.push_back(event());
  while (ends_.size() < program.instructions.size()) ends_.push_back(event());
  program_ = &program;
  enqueued_ = cursor_ = 0;
  running_ = false;
}

void CudaDevice::enter() { ZB_CUDA(*runtime_, cudaSetDevice(ordinal_)); }

bool CudaDevice::wait(const Program& program, uint32_t by, uint32_t instruction) {
  Stream stream = streams_[program.instructions[by].lane];
  ZB_CUDA(*runtime_, cudaStreamWaitEvent(stream, ends_[instruction], 0));
  return true;
}

void CudaDevice::started(const Program& program, uint32_t index) {
  ZB_CUDA(*runtime_, cudaEventRecord(starts_[index], streams_[program.instructions[index].lane]));
}

void CudaDevice::signal(const Program& program, uint32_t index) {
  uint32_t lane = program.instructions[index].lane;
  ZB_CUDA(*runtime_, cudaEventRecord(ends_[index], streams_[lane]));
  if (lane != 0) return;
  ++enqueued_;
  running_ = false;  // the interpreter has told the board that the rank waits
}

bool CudaDevice::sleep(uint32_t lane, int64_t ns) {
  sleeps_.push_back({ns, board_.get()});
  auto nap = [](void* data) {
    const Sleep& sleep = *static_cast<Sleep*>(data);
    int64_t end = now_ns() + sleep.ns;
    for (int64_t left = sleep.ns; left > 0 && !sleep.board->aborted(); left = end - now_ns()) {
      timespec t = to_timespec(std::min(left, kSliceNs));
      nanosleep(&t, nullptr);
    }
  };
  ZB_CUDA(*runtime_, cudaLaunchHostFunc(streams_[lane], nap, &sleeps_.back()));
  return true;
}

bool CudaDevice::graph(uint32_t lane, uint64_t exec) {
  ZB_CHECK(exec != 0, "a graph instruction names no executable graph");
  ZB_CUDA(*runtime_, cudaGraphLaunch(reinterpret_cast<GraphExec>(exec), streams_[lane]));
  return true;
}

bool CudaDevice::can_send(const Instruction& instruction, Sender& channel, const Message& message) {
  return channel.vacant(instruction.slot) &&
         out_.at(instruction.channel)->fits(instruction.slot, message.payload);
}

bool CudaDevice::send(const Instruction& instruction, Sender& channel, const Message& message) {
  OutLink& link = *out_.at(instruction.channel);
  Stream stream = streams_[instruction.lane];
  if (message.pieces.empty() && message.payload > 0) {
    if (scratch_bytes_ < message.payload) {
      if (scratch_) old_scratch_.push_back(std::move(scratch_));
      scratch_ = allocate(runtime_, ordinal_, message.payload);
      scratch_bytes_ = message.payload;
    }
    Piece piece{scratch_.get(), message.payload, 0};
    link.send(stream, instruction.slot, {"", {piece}, message.payload});
  } else {
    link.send(stream, instruction.slot, message);
  }
  // Last: who sees the header may enqueue a wait for the copy.
  channel.announce(instruction.slot, message.header, message.payload);
  board_->ring(link.peer());
  return true;
}

void CudaDevice::release(Stream stream, InLink& link, Receiver& channel, int slot) {
  if (!link.held(slot)) return;
  link.release(stream, slot);
  // Last: who sees the slot let go of may enqueue a copy into it.
  channel.release(slot);
  board_->ring(link.peer());
}

bool CudaDevice::can_receive(const Instruction& instruction, Receiver& channel) {
  InLink& link = *in_.at(instruction.channel);
  release(streams_[instruction.lane], link, channel, instruction.slot);
  return channel.arrived(instruction.slot);
}

bool CudaDevice::receive(const Instruction& instruction, Receiver& channel) {
  auto at_once = [](const Word& word, uint32_t value) {
    return reached(word.load(std::memory_order_acquire), value);
  };
  if (!channel.receive(instruction.slot, at_once)) return false;
  in_.at(instruction.channel)
      ->receive(streams_[instruction.lane], instruction.slot,
                channel.payload_bytes(instruction.slot));
  return true;
}

uint32_t CudaDevice::ticket() const { return board_->bell(rank_).load(std::memory_order_acquire); }

void CudaDevice::serve() {
  for (auto& link : out_) link->serve();
  for (auto& link : in_) link->serve();
}

bool CudaDevice::pause(uint32_t ticket) {
  serve();
  progress();
  futex_wait(board_->bell(rank_), ticket, kPauseNs);
  return !board_->aborted();
}

bool CudaDevice::over(Event event) const {
  return runtime_->done(runtime_->cudaEventQuery(event), "cudaEventQuery");
}

bool CudaDevice::finished(uint32_t instruction) const { return over(ends_.at(instruction)); }

/// Tells the board what the compute lane is at, so that a stall on the device has a name.
void CudaDevice::progress() {
  const std::vector<uint32_t>& lane = program_->by_lane[0];
  size_t before = cursor_;
  while (cursor_ < enqueued_ && over(ends_[lane[cursor_]])) ++cursor_;
  bool runs = cursor_ < enqueued_ && over(starts_[lane[cursor_]]);
  if (cursor_ == before && runs == running_) return;
  running_ = runs;
  if (runs)
    board_->running(rank_, program_->instructions[lane[cursor_]].tag);
  else
    board_->waiting(rank_);
}

void CudaDevice::finish(const Program& program, std::vector<std::shared_ptr<Receiver>>& receivers) {
  try {
    if (!board_->aborted()) release_all(program, receivers);
    drain();
    if (!board_->aborted()) mark();
  } catch (const std::exception& e) {
    // A link has broken: what waits for it on the device is let go, as after any error.
    board_->abort({rank_, Tag{}, 'r', e.what()});
    lost_ = !drained_after_abort();
  }
}

bool CudaDevice::drained_after_abort() {
  try {
    drain();
    return !lost_;
  } catch (const std::exception&) {
    return false;  // the device itself fails; what it said first is on the board
  }
}

/// Lets go of each slot's last message after all that was enqueued, so that the peers' next step
/// need not wait for this step's end.
void CudaDevice::release_all(const Program& program,
                             std::vector<std::shared_ptr<Receiver>>& receivers) {
  for (const auto& queue : program.by_lane) {
    if (queue.empty()) continue;
    const Instruction& first = program.instructions[queue.front()];
    if (first.work != Work::kReceive) continue;
    Stream stream = streams_[first.lane];
    for (const auto& other : program.by_lane)
      if (!other.empty() && &other != &queue)
        ZB_CUDA(*runtime_, cudaStreamWaitEvent(stream, ends_[other.back()], 0));
    for (uint32_t index : queue) {
      const Instruction& receive = program.instructions[index];
      if (receive.work == Work::kReceive)
        release(stream, *in_.at(receive.channel), *receivers.at(receive.channel), receive.slot);
    }
  }
}

bool CudaDevice::idle() const {
  for (Stream stream : streams_)
    if (!runtime_->done(runtime_->cudaStreamQuery(stream), "cudaStreamQuery")) return false;
  return true;
}

void CudaDevice::interrupt() {
  std::vector<Communicator*> communicators;
  auto abort = [&communicators](Link& link) {
    link.abort();
    if (Communicator* one = link.communicator()) communicators.push_back(one);
  };
  for (auto& link : out_) abort(*link);
  for (auto& link : in_) abort(*link);
  Communicator::abort(communicators);
}

void CudaDevice::drain() {
  int64_t deadline = 0;
  while (true) {
    uint32_t seen = ticket();
    // Repeated: a copy of a peer that was under way may write its flag once more.
    if (board_->aborted()) {
      interrupt();
      if (deadline == 0) deadline = now_ns() + kDrainNs;
    }
    if (idle()) return;
    if (deadline != 0 && now_ns() > deadline) {
      lost_ = true;
      return;
    }
    if (deadline == 0) {
      serve();
      progress();
    }
    futex_wait(board_->bell(rank_), seen, kNapNs);
  }
}

/// Ties the events' clock to the host's, once the device is at rest: by the tightest of a few
/// looks.
void CudaDevice::mark() {
  int64_t tightest = INT64_MAX;
  for (int look = 0; look < kLooks; ++look) {
    int64_t before = now_ns();
    ZB_CUDA(*runtime_, cudaEventRecord(spare_, streams_.at(0)));
    while (!over(spare_) && !board_->aborted()) {
      timespec t = to_timespec(1'000);
      nanosleep(&t, nullptr);
    }
    int64_t window = now_ns() - before;
    if (window >= tightest) continue;
    tightest = window;
    marked_ = before + window / 2;
    std::swap(mark_, spare_);
  }
}

void CudaDevice::measure(std::vector<Times>& times) {
  if (program_ == nullptr || board_->aborted()) return;
  OnDevice scope(*runtime_, ordinal_);
  auto when = [this](Event event) {
    float ms = 0;
    ZB_CUDA(*runtime_, cudaEventElapsedTime(&ms, event, mark_));
    return marked_ - static_cast<int64_t>(static_cast<double>(ms) * 1e6);
  };
  for (const auto& lane : program_->by_lane) {
    int64_t last = INT64_MIN;  // single precision may put neighbours the wrong way round
    for (uint32_t index : lane) {
      times[index].start = std::max(last, when(starts_[index]));
      last = times[index].end = std::max(times[index].start, when(ends_[index]));
    }
  }
}

void CudaDevice::close() {
  try {
    if (!lost_) give_back();
  } catch (const std::exception& e) {
    lost_ = true;
    board_->abort({rank_, Tag{}, 'r', std::string("while the pipeline was closed: ") + e.what()});
  }
  // No descriptor is left behind, whatever has to stay mapped.
  for (auto& link : out_) link->seal();
  for (auto& link : in_) link->seal();
}

void CudaDevice::give_back() {
  OnDevice scope(*runtime_, ordinal_);
  for (auto& link : out_) link->close();
  for (auto& link : in_) link->close();
  for (auto* events : {&starts_, &ends_, &befores_}) {
    for (Event e : *events) ZB_CUDA(*runtime_, cudaEventDestroy(e));
    events->clear();
  }
  for (Event e : {mark_, spare_}) ZB_CUDA(*runtime_, cudaEventDestroy(e));
  for (Stream s : streams_) ZB_CUDA(*runtime_, cudaStreamDestroy(s));
  streams_.clear();
  scratch_ = nullptr;
  old_scratch_.clear();
  sleeps_.clear();
}

}  // namespace zb::cuda
