#include "anneal.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>

namespace zb::schedule {

namespace {

// What the mean of all spans counts beside the largest: enough to lead over plateaus, too little
// to buy a shorter mean with a longer largest (found on the 12 rows of arXiv 2401.10241, table 9).
constexpr double kMeanShare = 0.05;
// Moves between two looks at the critical path.
constexpr int kStale = 40;

class Annealer {
 public:
  Annealer(const Problem& problem, const Order& order, const Annealing& how)
      : problem_(problem),
        how_(how),
        replay_(problem),
        now_(order),
        best_(order),
        random_(how.seed) {
    energy_ = measure();
    best_cost_ = cost_;
    best_energy_ = energy_;
  }

  Order run() {
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t move = 0; move < how_.moves; ++move) {
      if (move % 256 == 0 && how_.seconds < kNever) {
        const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
        if (spent.count() > how_.seconds) break;
      }
      const double left = 1 - static_cast<double>(move) / static_cast<double>(how_.moves);
      step(how_.heat * left * left);
    }
    return std::move(best_);
  }

 private:
  double measure() {
    const Spans& spans = replay_.run(now_);
    if (spans.stuck) return kNever;
    cost_ = how_.sync ? spans.makespan() : spans.largest();
    worst_ = 0;
    double most = -1;
    for (int r = 0; r < problem_.ranks; ++r) {
      const double reach = how_.sync ? spans.last[r] : spans.last[r] - spans.first[r];
      if (reach > most) most = reach, worst_ = r;
    }
    return cost_ + how_.share * spans.mean();
  }

  size_t below(size_t count) { return static_cast<size_t>(random_() % count); }

  void step(double heat) {
    if (path_.empty() || ++age_ > kStale) {
      // `replay_` may hold a refused order: look at the one that stands.
      measure();
      path_ = replay_.critical(now_, worst_);
      age_ = 0;
    }
    int rank;
    size_t from;
    if (below(4) != 0) {
      const auto& [r, at] = path_[below(path_.size())];
      rank = r;
      from = static_cast<size_t>(at);
    } else {
      rank = static_cast<int>(below(problem_.ranks));
      if (now_[rank].empty()) return;
      from = below(now_[rank].size());
    }
    auto& row = now_[rank];
    kept_ = row;
    if (!change(row, from) || !fits(problem_, row, rank)) {
      row.swap(kept_);
      return;
    }
    const double before_cost = cost_;
    const int before_worst = worst_;
    const double energy = measure();
    const double worse = energy - energy_;
    if (worse > 0 && (heat <= 0 || uniform() >= std::exp(-worse / heat))) {
      row.swap(kept_);
      cost_ = before_cost;
      worst_ = before_worst;
      return;
    }
    energy_ = energy;
    age_ += kStale / 8;
    if (cost_ < best_cost_ || (cost_ == best_cost_ && energy_ < best_energy_)) {
      best_ = now_;
      best_cost_ = cost_;
      best_energy_ = energy_;
    }
  }

  /// Move the action at `from`, one in four times a few in a row with it, one in four times the
  /// same action of the microbatches that follow too, by as many places.
  bool change(std::vector<int32_t>& row, size_t from) {
    const size_t far = 1 + below(below(3) != 0 ? 3 : 24);
    const bool back = below(2) != 0;
    const size_t way = below(4);
    if (way == 0) return shift(row, from, 1 + below(4), far, back);
    if (way != 1) return shift(row, from, 1, far, back);
    const int32_t code = row[from];
    size_t left = 1 + below(problem_.microbatches);
    bool changed = false;
    // Forwards for moves back and the other way round, so that no move meets the last one's.
    if (back) {
      for (size_t at = from; at < row.size() && left > 0; ++at) {
        if (row[at] == code) changed |= shift(row, at, 1, far, true), --left;
      }
    } else {
      for (size_t at = from + 1; at-- > 0 && left > 0;) {
        if (row[at] == code) changed |= shift(row, at, 1, far, false), --left;
      }
    }
    return changed;
  }

  /// Move `length` actions from `from` on by `far` places; false if that changes nothing.
  static bool shift(std::vector<int32_t>& row, size_t from, size_t length, size_t far, bool back) {
    length = std::min(length, row.size() - from);
    const auto at = row.begin() + static_cast<std::ptrdiff_t>(from);
    const auto past = at + static_cast<std::ptrdiff_t>(length);
    if (back) {
      far = std::min(far, from);
      if (far == 0) return false;
      std::rotate(at - static_cast<std::ptrdiff_t>(far), at, past);
    } else {
      far = std::min(far, row.size() - from - length);
      if (far == 0) return false;
      std::rotate(at, past, past + static_cast<std::ptrdiff_t>(far));
    }
    return true;
  }

  double uniform() { return static_cast<double>(random_() >> 11) * 0x1.0p-53; }

  const Problem& problem_;
  const Annealing how_;
  Replay replay_;
  Order now_, best_;
  std::vector<int32_t> kept_;
  std::vector<std::pair<int, int>> path_;
  std::mt19937_64 random_;
  double energy_ = 0, best_energy_ = 0, cost_ = 0, best_cost_ = 0;
  int worst_ = 0, age_ = 0;
};

}  // namespace

Order anneal(const Problem& problem, const Order& order, const Annealing& how) {
  return Annealer(problem, order, how).run();
}

}  // namespace zb::schedule
