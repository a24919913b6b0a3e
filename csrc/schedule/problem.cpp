#include "problem.hpp"

#include <algorithm>
#include <numeric>

namespace zb::schedule {

namespace {
// Budgets are often products such as 1.5 · p · act: a rounding error must not forbid an action.
constexpr double kTolerance = 1e-9;
}  // namespace

void Problem::index() {
  stages_of.assign(ranks, {});
  for (int s = 0; s < stages(); ++s) stages_of[placement[s]].push_back(s);
}

double Spans::largest() const {
  double most = 0;
  for (size_t r = 0; r < first.size(); ++r) most = std::max(most, last[r] - first[r]);
  return most;
}

double Spans::makespan() const {
  if (last.empty()) return 0;
  return *std::max_element(last.begin(), last.end()) -
         *std::min_element(first.begin(), first.end());
}

double Spans::mean() const {
  double sum = 0;
  for (size_t r = 0; r < first.size(); ++r) sum += last[r] - first[r];
  return sum / static_cast<double>(first.size());
}

bool fits(const Problem& problem, const std::vector<int32_t>& row, int rank) {
  const std::vector<int>& stages = problem.stages_of[rank];
  const double limit = problem.limit[rank] * (1 + kTolerance);
  const size_t held = stages.size();
  // Counts of F, I, W by the stage's place on its rank: few, so they are searched, not hashed.
  thread_local std::vector<int> counts;
  counts.assign(held * 3, 0);
  for (int32_t code : row) {
    size_t local = 0;
    while (stages[local] != code / 3) ++local;
    int* count = &counts[local * 3];
    const int kind = code % 3;
    if (++count[kind] > problem.microbatches) return false;
    if (kind != kForward && count[kind] > count[kind - 1]) return false;
    if (kind == kWeightGrad) continue;
    double bytes = 0;
    for (size_t k = 0; k < held; ++k) {
      const int* c = &counts[k * 3];
      bytes += (c[0] - c[1]) * problem.act[stages[k]] + (c[1] - c[2]) * problem.stash[stages[k]];
    }
    if (bytes > limit) return false;
  }
  return true;
}

Replay::Replay(const Problem& problem) : problem_(problem) {
  const size_t cells = problem.placement.size() * problem.microbatches;
  for (auto& done : done_) done.assign(cells, -1.0);
  count_.assign(problem.placement.size() * 3, 0);
  at_.assign(problem.ranks, 0);
  is_awake_.assign(problem.ranks, 0);
  spans_.first.assign(problem.ranks, 0);
  spans_.last.assign(problem.ranks, 0);
  place_.assign(problem.placement.size() * 3, std::vector<int>(problem.microbatches, -1));
}

const Spans& Replay::run(const Order& order) {
  for (auto& done : done_) std::fill(done.begin(), done.end(), -1.0);
  std::fill(count_.begin(), count_.end(), 0);
  std::fill(at_.begin(), at_.end(), 0);
  std::fill(spans_.first.begin(), spans_.first.end(), 0.0);
  std::fill(spans_.last.begin(), spans_.last.end(), 0.0);
  awake_.resize(problem_.ranks);
  for (int r = 0; r < problem_.ranks; ++r) awake_[r] = problem_.ranks - 1 - r;
  std::fill(is_awake_.begin(), is_awake_.end(), 1);
  while (!awake_.empty()) {
    const int rank = awake_.back();
    awake_.pop_back();
    is_awake_[rank] = 0;
    advance(rank, order[rank]);
  }
  spans_.stuck = false;
  for (int r = 0; r < problem_.ranks; ++r) {
    if (at_[r] < static_cast<int>(order[r].size())) spans_.stuck = true;
  }
  return spans_;
}

bool Replay::advance(int rank, const std::vector<int32_t>& row) {
  const int m = problem_.microbatches, last = problem_.stages() - 1;
  double clock = spans_.last[rank];
  int at = at_[rank];
  const int from = at;
  auto wake = [&](int other) {
    if (other == rank || is_awake_[other]) return;
    is_awake_[other] = 1;
    awake_.push_back(other);
  };
  for (; at < static_cast<int>(row.size()); ++at) {
    const int code = row[at], stage = code / 3, kind = code % 3;
    const int cell = stage * m + count_[code];
    double ready = 0;
    if (kind == kForward) {
      if (stage > 0) {
        const double input = done_[kForward][cell - m];
        if (input < 0) break;
        ready = input + problem_.hop[stage - 1];
      }
    } else if (kind == kInputGrad) {
      ready = done_[kForward][cell];
      if (ready < 0) break;
      if (stage < last) {
        const double gradient = done_[kInputGrad][cell + m];
        if (gradient < 0) break;
        ready = std::max(ready, gradient + problem_.hop[stage]);
      }
    } else {
      ready = done_[kInputGrad][cell];
      if (ready < 0) break;
    }
    const double start = std::max(clock, ready);
    if (at == 0) spans_.first[rank] = start;
    clock = start + problem_.seconds[kind][stage];
    done_[kind][cell] = clock;
    ++count_[code];
    if (kind == kForward && stage < last) wake(problem_.placement[stage + 1]);
    if (kind == kInputGrad && stage > 0) wake(problem_.placement[stage - 1]);
  }
  spans_.last[rank] = clock;
  at_[rank] = at;
  return at > from;
}

const std::vector<std::pair<int, int>>& Replay::critical(const Order& order, int rank) {
  const int m = problem_.microbatches, last = problem_.stages() - 1;
  std::vector<int> seen(problem_.placement.size() * 3, 0);
  for (int r = 0; r < problem_.ranks; ++r) {
    for (int i = 0; i < static_cast<int>(order[r].size()); ++i) {
      const int code = order[r][i];
      place_[code][seen[code]++] = i;
    }
  }
  // The microbatch of (rank, index) is found by counting back; `seen` serves as a running count.
  std::vector<std::vector<int>> microbatch(problem_.ranks);
  for (int r = 0; r < problem_.ranks; ++r) microbatch[r].resize(order[r].size());
  for (size_t code = 0; code < place_.size(); ++code) {
    const int r = problem_.placement[code / 3];
    for (int i = 0; i < seen[code]; ++i) microbatch[r][place_[code][i]] = i;
  }
  critical_.clear();
  int r = rank, at = static_cast<int>(order[rank].size()) - 1;
  while (at >= 0) {
    critical_.emplace_back(r, at);
    const int code = order[r][at], stage = code / 3, kind = code % 3;
    const int cell = stage * m + microbatch[r][at];
    const double start = done_[kind][cell] - problem_.seconds[kind][stage];
    double before = -1;
    if (at > 0) {
      const int other = order[r][at - 1];
      before = done_[other % 3][other / 3 * m + microbatch[r][at - 1]];
    }
    const double slack = 1e-12 * (1 + start);
    if (before >= start - slack) {
      --at;
    } else if (kind == kForward && stage > 0) {
      at = place_[code - 3][microbatch[r][at]];
      r = problem_.placement[stage - 1];
    } else if (kind == kInputGrad && stage < last) {
      const int gradient = place_[code + 3][microbatch[r][at]];
      r = problem_.placement[stage + 1];
      at = gradient;
    } else {
      break;
    }
  }
  return critical_;
}

}  // namespace zb::schedule
