/// Local search: move one action within its rank's order, keep what is better, sometimes what is
/// not.
#pragma once

#include "problem.hpp"

namespace zb::schedule {

struct Annealing {
  bool sync = false;  ///< shorten the makespan and not the longest span of a rank
  int64_t moves = 0;  ///< that are tried
  uint64_t seed = 0;
  double heat = 0;  ///< seconds by which a move may be worse, at the start
  double share = 0.05;
  double seconds = kNever;  ///< clock time after which to stop early
};

/// The best order found, which is never worse than `order`. `order` must be complete and fit.
Order anneal(const Problem& problem, const Order& order, const Annealing& how);

}  // namespace zb::schedule
