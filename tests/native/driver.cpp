/// The executor, its channels and its board without Python: for sanitizers, on the CPU and on the
/// fake CUDA device. `driver cpu|cuda local|forked PROGRAMS RUNS`; PROGRAMS as sanitize.py writes
/// them.
///
/// Every message says which run and action made it and holds bytes that follow from that, in a size
/// that follows from it too; whoever reads it checks both.
#include <dlfcn.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "carriers.hpp"
#include "cuda/cuda_device.hpp"
#include "cuda/ipc_link.hpp"
#include "cuda/nccl_link.hpp"
#include "cuda/staged_link.hpp"
#include "executor.hpp"

using namespace zb;

namespace {

struct RankProgram {
  std::shared_ptr<Program> program;
  std::vector<int> destinations, sources;
  std::map<uint32_t, uint32_t> sends, needs;
};

struct Plan {
  std::map<std::pair<int, int>, int> slots;
  std::vector<RankProgram> ranks;
  Wires wires;
};

template <class T>
T next(std::istream& in) {
  T value;
  if (!(in >> value)) throw std::runtime_error("the file of programs ends too early");
  return value;
}

std::vector<int> list(std::istream& in) {
  std::vector<int> out(next<size_t>(in));
  for (int& value : out) value = next<int>(in);
  return out;
}

Instruction instruction(std::istream& in) {
  Instruction i;
  i.lane = next<uint32_t>(in);
  i.work = static_cast<Work>(next<int>(in));
  i.channel = next<int>(in);
  i.slot = next<int>(in);
  i.tag.stage = next<int>(in);
  i.tag.kind = next<char>(in);
  i.tag.microbatch = next<int>(in);
  i.signals = next<int>(in) != 0;
  for (int wait : list(in)) i.waits.push_back(static_cast<uint32_t>(wait));
  return i;
}

Plan read(const char* path) {
  std::ifstream in(path);
  Plan plan;
  plan.ranks.resize(next<size_t>(in));
  for (auto n = next<size_t>(in); n > 0; --n) {
    int from = next<int>(in), to = next<int>(in);
    plan.slots[{from, to}] = next<int>(in);
  }
  for (RankProgram& rank : plan.ranks) {
    auto lanes = next<uint32_t>(in);
    std::vector<Instruction> rows(next<size_t>(in));
    for (Instruction& row : rows) row = instruction(in);
    rank.program = std::make_shared<Program>(lanes, rows);
    rank.destinations = list(in);
    rank.sources = list(in);
    for (auto* pairs : {&rank.sends, &rank.needs}) {
      std::vector<int> flat = list(in);
      for (size_t i = 0; i < flat.size(); i += 2)
        (*pairs)[static_cast<uint32_t>(flat[i])] = static_cast<uint32_t>(flat[i + 1]);
    }
  }
  return plan;
}

/// The fake device's own functions (tests/cuda/fake/extra.cpp).
struct Span {
  char* data;
  uint64_t bytes, pattern;
};

struct Fake {
  void (*kernel)(void*, const char*, const Span*, int, const Span*, int, unsigned) = nullptr;
  int (*malloc)(void**, size_t) = nullptr;
  int (*reports)(char*, int) = nullptr;

  Fake() {
    void* library = dlopen(getenv("ZBPIPE_CUDART"), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error("ZBPIPE_CUDART names no fake device");
    kernel = reinterpret_cast<decltype(kernel)>(dlsym(library, "fake_kernel"));
    malloc = reinterpret_cast<decltype(malloc)>(dlsym(library, "cudaMalloc"));
    reports = reinterpret_cast<decltype(reports)>(dlsym(library, "fake_reports"));
  }
};

/// Shared by all processes: where each channel is found.
struct Address {
  std::atomic<int> pid;  // of the sending rank, when the rest is there
  int channel, link;
  cuda::NcclId id;
};

struct Meeting {
  Address at[64];
};

/// One rank: its executor and what its actions do.
class Rank {
 public:
  Rank(const Plan& plan, int rank, std::shared_ptr<Board> board, const std::string& device)
      : mine_(plan.ranks[rank]), rank_(rank), board_(board), how_(device) {
    if (device != "cpu") {
      fake_ = std::make_unique<Fake>();
      device_ = std::make_shared<cuda::CudaDevice>(board, rank, 0);
    }
    auto nothing = [](bool) {};
    executor_ = std::make_unique<Executor>(board, rank, 20'000'000'000, nothing, device_);
  }

  void offer(const Plan& plan, Meeting& meeting) {
    for (int to : mine_.destinations) {
      int slots = plan.slots.at({rank_, to});
      auto sender = std::make_shared<Sender>(slots);
      Address& address = meeting.at[rank_ * 8 + to];
      address.channel = sender->fd();
      executor_->add(std::move(sender));
      if (how_ == "staged") {
        auto link = std::make_shared<cuda::StagedOut>(cuda::Runtime::load(), board_, rank_, 0, to,
                                                      slots, 200'000);  // few bytes ahead
        carriers.carry(link->departures(), plan.wires.out(rank_, to));
        device_->add(std::move(link));
      } else if (how_ == "nccl") {
        auto link = std::make_shared<cuda::NcclOut>(cuda::Runtime::load(), 0, to, slots);
        address.id = link->id();
        connecting_.push_back([link] { return link->advance(); });
        device_->add(std::move(link));
      } else if (device_) {
        auto link = std::make_shared<cuda::IpcOut>(cuda::Runtime::load(), board_, 0, to, slots);
        address.link = link->words()->fd();
        out_[to] = link;
        device_->add(std::move(link));
      }
      address.pid.store(getpid(), std::memory_order_release);
    }
  }

  void take(const Plan& plan, Meeting& meeting, const std::map<int, Rank*>& beside) {
    for (int from : mine_.sources) {
      Address& address = meeting.at[from * 8 + rank_];
      int pid = 0;
      for (int64_t end = now_ns() + 20'000'000'000; pid == 0 && now_ns() < end; usleep(1000))
        pid = address.pid.load(std::memory_order_acquire);
      if (pid == 0) throw std::runtime_error("a rank did not come");
      int slots = plan.slots.at({from, rank_});
      executor_->add(std::make_shared<Receiver>(File::open(pid, address.channel), slots, !device_));
      if (!device_) continue;
      if (how_ == "staged") {
        auto link = std::make_shared<cuda::StagedIn>(cuda::Runtime::load(), board_, rank_, 0, from,
                                                     slots, true);
        carriers.bring(link->arrivals(), plan.wires.in(from, rank_));
        device_->add(std::move(link));
        continue;
      }
      if (how_ == "nccl") {
        auto link =
            std::make_shared<cuda::NcclIn>(cuda::Runtime::load(), 0, from, slots, address.id, true);
        connecting_.push_back([link] { return link->advance(); });
        device_->add(std::move(link));
        continue;
      }
      std::shared_ptr<cuda::LinkWords> words;
      auto neighbour = beside.find(from);
      if (neighbour != beside.end()) {
        words = neighbour->second->out_.at(rank_)->words();
        words->make_local();
      } else {
        words = std::make_shared<cuda::LinkWords>(cuda::Runtime::load(),
                                                  File::open(pid, address.link), slots);
      }
      device_->add(std::make_shared<cuda::IpcIn>(cuda::Runtime::load(), board_, 0, from,
                                                 std::move(words), true));
    }
  }

  /// True when every link is connected; to be called again until then.
  bool connected() {
    auto done = [](const std::function<bool()>& advance) { return advance(); };
    connecting_.erase(std::remove_if(connecting_.begin(), connecting_.end(), done),
                      connecting_.end());
    return connecting_.empty();
  }

  void start(int run, bool fails) {
    run_ = run;
    fails_ = fails;
    sending_.clear();
    executor_->start(mine_.program, [this](uint32_t index) { return act(index); });
  }

  bool join() {
    while (!executor_->join(100'000'000)) executor_->supervise();
    return !board_->aborted();
  }

  void stop() { executor_->halt(5'000'000'000); }
  Carriers carriers;

  std::string reports() const {
    std::string text(1 << 16, 0);
    if (fake_) fake_->reports(text.data(), static_cast<int>(text.size()) - 1);
    return text.c_str();
  }

 private:
  std::string name(const Tag& tag) const {
    return std::to_string(run_) + " " + std::to_string(tag.stage) + tag.kind +
           std::to_string(tag.microbatch);
  }

  static size_t size(const std::string& name) {
    return std::hash<std::string>()(name) % 7 == 0 ? 0 : std::hash<std::string>()(name) % 90'000;
  }

  bool act(uint32_t index) {
    for (auto it = sending_.begin(); it != sending_.end();)
      it = executor_->finished(it->first) ? sending_.erase(it) : std::next(it);
    if (fails_ && rank_ == 1 && index == 2) throw std::runtime_error("as it was told to");
    std::vector<Span> reads;
    auto need = mine_.needs.find(index);
    if (need != mine_.needs.end()) read(mine_.program->instructions[need->second], reads);
    auto send = mine_.sends.find(index);
    std::string mine = name(mine_.program->instructions[index].tag);
    if (send == mine_.sends.end()) {
      if (device_) launch(mine, reads, {});
      return true;
    }
    size_t bytes = size(mine);
    char* data = make(send->second, mine, bytes, reads);
    Message message{mine, {}, bytes};
    if (bytes > 0) message.pieces.push_back({data, bytes, 0});
    executor_->post(send->second, std::move(message));
    return true;
  }

  void read(const Instruction& receive, std::vector<Span>& reads) {
    const Receiver& channel = executor_->receiver(receive.channel);
    std::string want = name(receive.tag), got = channel.header(receive.slot);
    if (got != want) throw std::runtime_error("got " + got + ", want " + want);
    size_t bytes = channel.payload_bytes(receive.slot);
    if (bytes != size(want)) throw std::runtime_error(want + " has a wrong size");
    if (device_) {
      reads.push_back({device_->payload(receive.channel, receive.slot), bytes, pattern(want)});
      return;
    }
    const char* data = channel.payload(receive.slot);
    for (size_t i = 0; i < bytes; ++i)
      if (data[i] != static_cast<char>(pattern(want) + i))
        throw std::runtime_error(want + " holds something else");
  }

  static uint64_t pattern(const std::string& name) { return std::hash<std::string>()(name) | 1; }

  /// The action's result, in memory that is kept until it is sent.
  char* make(uint32_t send, const std::string& name, size_t bytes, const std::vector<Span>& reads) {
    if (device_) {
      void* data = nullptr;
      fake_->malloc(&data, bytes + 1);  // never given back: the fake counts it, the run is short
      auto* memory = static_cast<char*>(data);
      launch(name, reads, {{memory, bytes, pattern(name)}});
      return memory;
    }
    std::vector<char>& memory = sending_[send];
    memory.resize(bytes);
    for (size_t i = 0; i < bytes; ++i) memory[i] = static_cast<char>(pattern(name) + i);
    return memory.data();
  }

  void launch(const std::string& name, const std::vector<Span>& reads,
              const std::vector<Span>& writes) {
    fake_->kernel(device_->stream(0), name.c_str(), reads.data(), static_cast<int>(reads.size()),
                  writes.data(), static_cast<int>(writes.size()), 0);
  }

  const RankProgram& mine_;
  int rank_;
  std::shared_ptr<Board> board_;
  std::string how_;
  std::vector<std::function<bool()>> connecting_;
  std::unique_ptr<Fake> fake_;
  std::shared_ptr<cuda::CudaDevice> device_;
  std::unique_ptr<Executor> executor_;
  std::map<int, std::shared_ptr<cuda::IpcOut>> out_;
  std::map<uint32_t, std::vector<char>> sending_;
  int run_ = 0;
  bool fails_ = false;
};

struct Options {
  std::string device;
  bool fail;
  int runs;
};

/// Drives `ranks` in this process; 0 where all went well.
int drive(const Plan& plan, const std::vector<int>& ranks, const std::shared_ptr<Board>& board,
          Meeting& meeting, const Options& options) {
  std::vector<std::unique_ptr<Rank>> mine;
  std::map<int, Rank*> beside;
  for (int rank : ranks) {
    mine.push_back(std::make_unique<Rank>(plan, rank, board, options.device));
    beside[rank] = mine.back().get();
  }
  for (auto& rank : mine) rank->offer(plan, meeting);
  for (auto& rank : mine) rank->take(plan, meeting, beside);
  int64_t end = now_ns() + 20'000'000'000;
  for (bool all = false; !all; usleep(100)) {
    if (now_ns() > end) throw std::runtime_error("a rank did not connect");
    all = true;
    for (auto& rank : mine) all = rank->connected() && all;
  }
  bool ok = true;
  for (int run = 0; run < options.runs && ok; ++run) {
    for (auto& rank : mine) rank->start(run, options.fail && run == options.runs - 1);
    for (auto& rank : mine) ok = rank->join() && ok;
  }
  for (auto& rank : mine) rank->stop();
  for (auto& rank : mine) rank->carriers.finish(ok);
  for (auto& rank : mine) rank->carriers.join();
  // After an abort copies run on without order, into memory that nobody reads any more.
  if (options.fail) return !ok && board->failure().message == "as it was told to" ? 0 : 1;
  std::string reports = mine.front()->reports();
  if (!ok) fprintf(stderr, "rank %d failed: %s\n", ranks.front(), board->failure().message.c_str());
  fputs(reports.c_str(), stderr);
  return ok && reports.empty() ? 0 : 1;
}

int forked(const Plan& plan, Meeting& meeting, const Options& options) {
  auto ranks = static_cast<int>(plan.ranks.size());
  auto board = Board::create(ranks);
  int parent = getpid(), failed = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    if (fork() != 0) continue;
    int status = 1;
    try {
      status = drive(plan, {rank}, Board::open(parent, board->fd(), ranks), meeting, options);
    } catch (const std::exception& e) {
      fprintf(stderr, "rank %d: %s\n", rank, e.what());
    }
    exit(status);
  }
  for (int rank = 0, status = 0; rank < ranks; ++rank)
    if (wait(&status) < 0 || status != 0) failed = 1;
  return failed;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5 && argc != 6) {
    fprintf(stderr, "usage: driver cpu|cuda|nccl|staged local|forked PROGRAMS RUNS [fail]\n");
    return 2;
  }
  Options options{argv[1], argc == 6, atoi(argv[4])};
  try {
    Plan plan = read(argv[3]);
    for (const auto& [pair, _] : plan.slots) plan.wires.add(pair.first, pair.second);
    auto* meeting = static_cast<Meeting*>(
        mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    if (strcmp(argv[2], "forked") == 0) return forked(plan, *meeting, options);
    auto ranks = static_cast<int>(plan.ranks.size());
    std::vector<int> all(plan.ranks.size());
    for (int rank = 0; rank < ranks; ++rank) all[rank] = rank;
    return drive(plan, all, Board::create(ranks), *meeting, options);
  } catch (const std::exception& e) {
    fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
