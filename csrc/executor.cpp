#include "executor.hpp"

#include <sys/prctl.h>

#include <string>
#include <thread>

#include "cpu/cpu_device.hpp"

namespace zb {

/// Everything a lane's thread touches; a lane that is left behind keeps it alive.
struct Executor::State {
  State(std::shared_ptr<Board> b, int r, int64_t timeout, ThreadHook h, std::shared_ptr<Device> d)
      : board(std::move(b)),
        rank(r),
        timeout_ns(timeout),
        hook(std::move(h)),
        device(std::move(d)) {
    if (!device) device = std::make_shared<CpuDevice>(board);
  }

  std::shared_ptr<Board> board;
  int rank;
  int64_t timeout_ns;
  ThreadHook hook;
  std::shared_ptr<Device> device;
  std::vector<std::shared_ptr<Sender>> senders;
  std::vector<std::shared_ptr<Receiver>> receivers;

  // One run.
  std::shared_ptr<const Program> program;
  Callback callback;
  std::vector<Message> outgoing;
  std::vector<Times> times;
  std::unique_ptr<std::atomic<bool>[]> over;  // on a device that enqueues: enqueued
  bool measured = false;                      // `times` are the device's

  Word round{0};                  // counts runs; lanes sleep on it
  Word busy{0};                   // 1 until the run has ended; whoever joins sleeps on it
  std::atomic<uint32_t> left{0};  // lanes still in this run
  std::atomic<bool> stopping{false};
  bool abandoned = false;
  std::atomic<bool> closed{false};
  pid_t owner = getpid();
  std::vector<std::thread> lanes;
  std::vector<std::unique_ptr<std::atomic<bool>>> exited;

  void check(const Program& next) const;
  void live(uint32_t lane, uint32_t seen);
  size_t threads(const Program& next) const;
  void run_lane(uint32_t lane, bool& hooked);
  bool run(uint32_t index, bool& hooked);
  bool perform(uint32_t index, bool& hooked);
  void drive(bool& hooked);
  void enqueue(bool& hooked);
  enum class Step { kDone, kNotYet, kFailed };
  Step advance(uint32_t index, bool& waited, bool& hooked);
  Step try_advance(uint32_t index, bool& waited, bool& hooked);
  bool work(uint32_t index, const Instruction& instruction, bool& hooked);
  Message& message_of(uint32_t index);
  void fail(const Instruction& instruction, const std::string& what);
};

void Executor::State::live(uint32_t lane, uint32_t seen) {
  prctl(PR_SET_NAME, ("zb-lane" + std::to_string(lane)).c_str());
  prctl(PR_SET_TIMERSLACK, 1UL);  // ns; the default of 50 µs would lengthen every sleep
  bool hooked = false;
  while (true) {
    while (round.load(std::memory_order_acquire) == seen && !stopping)
      futex_wait(round, seen, 3'600'000'000'000);
    if (stopping) break;
    ++seen;
    if (device->enqueues())
      drive(hooked);
    else if (lane < program->by_lane.size())
      run_lane(lane, hooked);
    if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      // First, since the next run may begin as soon as this one is seen to have ended.
      if (!board->aborted()) board->end_step(rank);
      store_and_wake(busy, 0);
    }
  }
  if (hooked) hook(false);
  *exited[lane] = true;
}

void Executor::State::run_lane(uint32_t lane, bool& hooked) {
  for (uint32_t index : program->by_lane[lane]) {
    const Instruction& instruction = program->instructions[index];
    try {
      if (run(index, hooked)) continue;
      if (!board->aborted()) fail(instruction, "the action failed and did not say why");
      return;
    } catch (const std::exception& e) {
      fail(instruction, e.what());
      return;
    }
  }
}

void Executor::State::fail(const Instruction& instruction, const std::string& what) {
  board->abort({rank, instruction.tag, 'r', what});
}

bool Executor::State::run(uint32_t index, bool& hooked) {
  const Instruction& instruction = program->instructions[index];
  for (uint32_t w : instruction.waits)
    if (!device->wait(*program, index, w)) return false;
  return perform(index, hooked);
}

bool Executor::State::perform(uint32_t index, bool& hooked) {
  const Instruction& instruction = program->instructions[index];
  if (board->aborted()) return false;
  times[index].start = now_ns();
  bool ok = work(index, instruction, hooked);
  times[index].end = now_ns();
  if (!ok) return false;
  over[index].store(true, std::memory_order_release);
  device->signal(*program, index);
  return true;
}

/// A run on a device that enqueues, until the device is through with it.
void Executor::State::drive(bool& hooked) {
  try {
    enqueue(hooked);
  } catch (const std::exception& e) {
    board->abort({rank, Tag{}, 'r', e.what()});
  }
  try {  // also after an error: what was enqueued must have run out before anything is given back
    device->finish(*program, receivers);
  } catch (const std::exception& e) {
    board->abort({rank, Tag{}, 'r', e.what()});
  }
}

/// One thread for all lanes: gives the device, lane by lane, whatever waits for nothing that has
/// yet to be enqueued. Such an order cannot deadlock, even if all streams share one hardware queue.
void Executor::State::enqueue(bool& hooked) {
  device->enter();
  std::vector<size_t> next(program->by_lane.size(), 0);
  std::unique_ptr<bool[]> waited(new bool[next.size()]());
  size_t missing = program->instructions.size();
  while (missing > 0 && !board->aborted()) {
    uint32_t ticket = device->ticket();
    size_t before = missing;
    // One of each lane at a time: a result is sent before the next action is called.
    for (size_t lane = 0; lane < next.size(); ++lane) {
      const std::vector<uint32_t>& queue = program->by_lane[lane];
      if (next[lane] == queue.size()) continue;
      Step step = try_advance(queue[next[lane]], waited[lane], hooked);
      if (step == Step::kFailed) return;
      if (step == Step::kNotYet) continue;
      waited[lane] = false;
      ++next[lane];
      --missing;
    }
    if (missing == before && !device->pause(ticket)) return;
  }
}

Executor::State::Step Executor::State::try_advance(uint32_t index, bool& waited, bool& hooked) {
  const Instruction& instruction = program->instructions[index];
  try {
    Step step = advance(index, waited, hooked);
    if (step == Step::kFailed && !board->aborted())
      fail(instruction, "the action failed and did not say why");
    return step;
  } catch (const std::exception& e) {
    fail(instruction, e.what());
    return Step::kFailed;
  }
}

Executor::State::Step Executor::State::advance(uint32_t index, bool& waited, bool& hooked) {
  const Instruction& instruction = program->instructions[index];
  if (!waited) {
    for (uint32_t w : instruction.waits)
      if (!over[w].load(std::memory_order_relaxed)) return Step::kNotYet;
    for (uint32_t w : instruction.waits)
      if (!device->wait(*program, index, w)) return Step::kFailed;
    waited = true;
  }
  if (instruction.work == Work::kSend &&
      !device->can_send(instruction, *senders[instruction.channel], message_of(index)))
    return Step::kNotYet;
  if (instruction.work == Work::kReceive &&
      !device->can_receive(instruction, *receivers[instruction.channel]))
    return Step::kNotYet;
  device->started(*program, index);
  return perform(index, hooked) ? Step::kDone : Step::kFailed;
}

Message& Executor::State::message_of(uint32_t index) {
  Message& message = outgoing[index];
  if (message.pieces.empty() && message.header.empty())
    message.payload = program->instructions[index].amount;
  return message;
}

bool Executor::State::work(uint32_t index, const Instruction& instruction, bool& hooked) {
  switch (instruction.work) {
    case Work::kCallback: {
      if (!hooked) {
        hooked = true;
        hook(true);
      }
      board->running(rank, instruction.tag);
      bool ok = callback(index);
      board->waiting(rank);
      return ok;
    }
    case Work::kSleep: {
      board->running(rank, instruction.tag);
      bool ok = device->sleep(instruction.lane, static_cast<int64_t>(instruction.amount));
      board->waiting(rank);
      return ok;
    }
    case Work::kSend: {
      Message& message = message_of(index);
      bool ok = device->send(instruction, *senders.at(instruction.channel), message);
      message = Message{};
      return ok;
    }
    case Work::kReceive:
      return device->receive(instruction, *receivers.at(instruction.channel));
    case Work::kGraph:
      return device->graph(instruction.lane, instruction.amount);
  }
  return false;
}

Executor::Executor(std::shared_ptr<Board> board, int rank, int64_t timeout_ns, ThreadHook hook,
                   std::shared_ptr<Device> device)
    : state_(std::make_shared<State>(std::move(board), rank, timeout_ns, std::move(hook),
                                     std::move(device))) {
  ZB_CHECK(timeout_ns > 0, "the timeout must be positive");
  state_->board->enter(rank);
}

Executor::~Executor() {
  if (!halt(kHaltNs)) abandon();
}

int Executor::add(std::shared_ptr<Sender> sender) {
  state_->senders.push_back(std::move(sender));
  return static_cast<int>(state_->senders.size()) - 1;
}

int Executor::add(std::shared_ptr<Receiver> receiver) {
  state_->receivers.push_back(std::move(receiver));
  return static_cast<int>(state_->receivers.size()) - 1;
}

/// What only the channels of this rank can tell.
void Executor::State::check(const Program& next) const {
  for (const Instruction& i : next.instructions) {
    auto channel = static_cast<size_t>(i.channel);
    if (i.work == Work::kSend)
      ZB_CHECK(i.channel >= 0 && channel < senders.size() && i.slot >= 0 &&
                   i.slot < senders[channel]->slots(),
               "a send names a channel or a slot that is not there");
    if (i.work == Work::kReceive)
      ZB_CHECK(i.channel >= 0 && channel < receivers.size() && i.slot >= 0 &&
                   i.slot < receivers[channel]->slots(),
               "a receive names a channel or a slot that is not there");
  }
}

size_t Executor::State::threads(const Program& next) const {
  return device->enqueues() ? 1 : next.by_lane.size();
}

void Executor::start(std::shared_ptr<const Program> program, Callback callback) {
  State& s = *state_;
  ZB_CHECK(s.owner == getpid(), "this process was forked from the executor's and has no lanes");
  ZB_CHECK(!s.stopping, "this executor has stopped");
  ZB_CHECK(s.busy.load() == 0, "the last run has not ended");
  s.check(*program);
  size_t n = program->instructions.size();
  s.program = std::move(program);
  s.callback = std::move(callback);
  s.outgoing.assign(n, Message{});
  s.times.assign(n, Times{});
  s.over = std::make_unique<std::atomic<bool>[]>(n);
  for (size_t i = 0; i < n; ++i) s.over[i].store(false, std::memory_order_relaxed);
  s.measured = false;
  s.device->begin(*s.program);
  uint32_t seen = s.round.load();
  while (s.lanes.size() < s.threads(*s.program)) {
    auto lane = static_cast<uint32_t>(s.lanes.size());
    if (s.exited.size() == lane) s.exited.push_back(std::make_unique<std::atomic<bool>>(false));
    s.lanes.emplace_back([state = state_, lane, seen] { state->live(lane, seen); });
  }
  s.board->begin_step(s.rank);
  s.left.store(static_cast<uint32_t>(s.lanes.size()));
  s.busy.store(1);
  store_and_wake(s.round, seen + 1);
}

bool Executor::join(int64_t ns) {
  State& s = *state_;
  int64_t end = now_ns() + ns;
  while (s.busy.load(std::memory_order_acquire) != 0) {
    int64_t remaining = end - now_ns();
    if (remaining <= 0) return false;
    futex_wait(s.busy, 1, remaining);
  }
  if (!s.board->aborted())
    for (auto& receiver : s.receivers) receiver->release_all();
  s.callback = nullptr;  // it may own whatever owns this executor
  return true;
}

bool Executor::supervise() {
  State& s = *state_;
  if (s.busy.load(std::memory_order_acquire) == 0) return s.board->aborted();
  bool aborted = s.board->supervise(s.rank, s.timeout_ns);
  if (aborted) s.device->interrupt();
  return aborted;
}

void Executor::post(uint32_t instruction, Message message) {
  ZB_CHECK(instruction < state_->outgoing.size() &&
               state_->program->instructions[instruction].work == Work::kSend,
           "a message is posted for an instruction that sends none");
  state_->outgoing[instruction] = std::move(message);
}

bool Executor::finished(uint32_t instruction) const {
  ZB_CHECK(instruction < state_->outgoing.size(), "no such instruction");
  return state_->over[instruction].load(std::memory_order_acquire) &&
         state_->device->finished(instruction);
}

const std::vector<Times>& Executor::times() const {
  State& s = *state_;
  if (!s.measured && s.busy.load(std::memory_order_acquire) == 0) {
    s.device->measure(s.times);
    s.measured = true;
  }
  return s.times;
}

const Receiver& Executor::receiver(int channel) const { return *state_->receivers.at(channel); }

bool Executor::halt(int64_t ns) {
  State& s = *state_;
  if (s.abandoned) return true;
  if (s.owner == getpid()) {
    if (!s.stopping.exchange(true)) {
      if (s.busy.load() != 0)
        s.board->abort({s.rank, Tag{}, 'i', "the pipeline was closed in a step"});
      s.board->leave(s.rank);
    }
    if (!join_lanes(now_ns() + ns)) return false;
    if (!s.closed.exchange(true)) s.device->close();
  } else if (!s.lanes.empty()) {
    // A forked child has the handles of threads that it does not have: never touch them.
    new std::vector<std::thread>(std::move(s.lanes));
    s.lanes.clear();
  }
  s.senders.clear();
  s.receivers.clear();
  s.callback = nullptr;
  return true;
}

bool Executor::join_lanes(int64_t until) {
  State& s = *state_;
  for (size_t i = 0; i < s.lanes.size(); ++i) {
    while (!*s.exited[i]) {
      if (now_ns() > until) return false;
      if (s.board->aborted()) s.device->interrupt();
      futex_wake(s.round);
      timespec t = to_timespec(200'000);
      nanosleep(&t, nullptr);
    }
    if (s.lanes[i].joinable()) s.lanes[i].join();
  }
  return true;
}

void Executor::abandon() {
  State& s = *state_;
  for (std::thread& lane : s.lanes)
    if (lane.joinable()) lane.detach();
  s.abandoned = true;
}

}  // namespace zb
