#include "lister.hpp"

#include <algorithm>
#include <queue>
#include <utility>

namespace zb::schedule {

namespace {

constexpr double kTolerance = 1e-9;

struct Choice {
  int code = -1;
  double key = kNever;
  double ready = kNever;
};

class Lister {
 public:
  Lister(const Problem& problem, const Policy& policy)
      : problem_(problem), policy_(policy), order_(problem.ranks) {
    const size_t stages = problem.placement.size();
    const int m = problem.microbatches;
    input_.assign(stages * m, kNever);
    std::fill(input_.begin(), input_.begin() + m, 0.0);
    gradient_.assign(stages * m, kNever);
    std::fill(gradient_.end() - m, gradient_.end(), 0.0);
    forward_.assign(stages * m, kNever);
    count_.assign(stages * 3, 0);
    free_.assign(problem.ranks, 0.0);
    due_.resize(problem.ranks);
    due_from_.assign(problem.ranks, 0);
    peak_.assign(stages, 0.0);
    for (int s = 0; s < problem.stages(); ++s) {
      peak_[s] = std::max(problem.act[s], problem.stash[s]);
    }
    for (int r = 0; r < problem.ranks; ++r) {
      order_[r].reserve(problem.stages_of[r].size() * m * 3);
    }
  }

  Order run() {
    for (int r = 0; r < problem_.ranks; ++r) events_.emplace(0.0, r);
    while (!events_.empty()) {
      const auto [now, rank] = events_.top();
      events_.pop();
      if (now < free_[rank]) continue;
      const int code = choose(rank, now);
      if (code >= 0) start(rank, code, now);
    }
    for (int r = 0; r < problem_.ranks; ++r) {
      if (order_[r].size() != problem_.stages_of[r].size() * problem_.microbatches * 3) return {};
    }
    return std::move(order_);
  }

 private:
  int forwards(int s) const { return count_[s * 3 + kForward]; }
  int backwards(int s) const { return count_[s * 3 + kInputGrad]; }

  /// Whether F of `stage` fits, and leaves every microbatch room to go on.
  ///
  /// The next microbatch of a later stage t of the rank will, when it is the oldest, find there
  /// what younger ones hold of the stages before t, and needs t and those after it for itself.
  bool room(int rank, int stage) const {
    const double limit = problem_.limit[rank] * (1 + kTolerance);
    const std::vector<int>& stages = problem_.stages_of[rank];
    double held = 0;
    for (int s : stages) {
      if (policy_.strict && s > stage && held + peak_[s] > limit) return false;
      held += (forwards(s) + (s == stage) - backwards(s)) * peak_[s] +
              (backwards(s) - count_[s * 3 + kWeightGrad]) * problem_.stash[s];
    }
    if (held > limit) return false;
    for (int t : stages) {
      if (t <= stage) continue;
      double need = 0;
      for (int s : stages) {
        need += s < t ? (forwards(s) + (s == stage) - forwards(t)) * peak_[s] : peak_[s];
      }
      if (need > limit) return false;
    }
    return true;
  }

  bool has_due(int rank) const { return due_from_[rank] < due_[rank].size(); }

  /// The action to run now, or -1 to wait for the next event.
  int choose(int rank, double now) {
    const int m = problem_.microbatches;
    Choice best, blocked;
    double arrival = kNever;
    for (int s : problem_.stages_of[rank]) {
      const int f = forwards(s), b = backwards(s);
      if (f < m && f - b < policy_.flight[s]) {
        const double ready = input_[s * m + f];
        const double key = policy_.forward_key[s] + f * policy_.interval;
        if (room(rank, s)) {
          consider({s * 3 + kForward, key, ready}, now, best, arrival);
        } else if (ready <= now && key < blocked.key) {
          blocked = {s * 3 + kForward, key, ready};
        }
      }
      if (b < f) {
        const double ready = std::max(gradient_[s * m + b], forward_[s * m + b]);
        const double key = policy_.backward_key[s] + b * policy_.interval;
        consider({s * 3 + kInputGrad, key, ready}, now, best, arrival);
      }
    }
    if (has_due(rank)) {
      const int weight = due_[rank][due_from_[rank]];
      if (blocked.key < best.key) return weight;
      const bool forward = best.code >= 0 && best.code % 3 == kForward;
      const int backlog = static_cast<int>(due_[rank].size() - due_from_[rank]);
      if (forward && backlog > policy_.backlog[rank]) return weight;
      if (best.ready <= now) return best.code;
      const double until = best.code >= 0 ? best.ready : arrival;
      const double length = problem_.seconds[kWeightGrad][weight / 3];
      return until - now >= policy_.gap * length ? weight : -1;
    }
    return best.ready <= now ? best.code : -1;
  }

  void consider(Choice choice, double now, Choice& best, double& arrival) const {
    arrival = std::min(arrival, choice.ready);
    if (choice.ready <= now + policy_.patience && choice.key < best.key) best = choice;
  }

  void start(int rank, int code, double now) {
    const int m = problem_.microbatches, stage = code / 3, kind = code % 3;
    const int cell = stage * m + count_[code]++;
    const double end = now + problem_.seconds[kind][stage];
    order_[rank].push_back(code);
    free_[rank] = end;
    events_.emplace(end, rank);
    if (kind == kForward) {
      forward_[cell] = end;
      if (stage + 1 < problem_.stages()) arrive(input_[cell + m], stage, stage + 1, end);
    } else if (kind == kInputGrad) {
      due_[rank].push_back(stage * 3 + kWeightGrad);
      if (stage > 0) arrive(gradient_[cell - m], stage - 1, stage - 1, end);
    } else {
      ++due_from_[rank];
    }
  }

  void arrive(double& slot, int boundary, int to, double end) {
    slot = end + problem_.hop[boundary];
    events_.emplace(slot, problem_.placement[to]);
  }

  using Event = std::pair<double, int>;

  const Problem& problem_;
  const Policy& policy_;
  Order order_;
  std::vector<double> input_, gradient_, forward_;  ///< by stage · m + microbatch
  std::vector<int> count_;
  std::vector<double> free_;
  std::vector<std::vector<int>> due_;  ///< of each rank: W in the order of their I
  std::vector<size_t> due_from_;
  std::vector<double> peak_;  ///< bytes from F on, at the most
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
};

}  // namespace

Order list(const Problem& problem, const Policy& policy) { return Lister(problem, policy).run(); }

}  // namespace zb::schedule
