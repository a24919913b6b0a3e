/// Memory-limited list scheduling: whenever a rank is free it takes the best action that it may.
#pragma once

#include "problem.hpp"

namespace zb::schedule {

/// How a rank chooses. F and I of microbatch i have the key offset[stage] + i · interval; the
/// smallest key goes first, and W fills the gaps.
struct Policy {
  std::vector<double> forward_key, backward_key;  ///< offset of each stage
  double interval = 0;
  double patience = 0;       ///< seconds to wait for an action of smaller key that is on its way
  double gap = 0;            ///< W fills a gap that is at least this share of it
  bool strict = false;       ///< keep the room of each later stage free of all but its own
  std::vector<int> flight;   ///< of each stage: F that may be ahead of I
  std::vector<int> backlog;  ///< of each rank: W that may be due before F must wait for one
};

/// The order that `policy` makes; empty if the ranks came to wait for each other.
///
/// F of a stage is admitted only where the rank keeps room for the later stages it holds, so that
/// a microbatch that is on its way can always be finished.
Order list(const Problem& problem, const Policy& policy);

}  // namespace zb::schedule
