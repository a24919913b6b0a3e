/// What a scheduler is given and what it makes: costs on flat arrays, and each rank's order of
/// work.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace zb::schedule {

constexpr double kNever = std::numeric_limits<double>::infinity();

enum Kind : int { kForward = 0, kInputGrad = 1, kWeightGrad = 2 };

/// Costs, placement and memory. Seconds and bytes, as zbpipe.costs.Costs has them.
struct Problem {
  int ranks = 0;
  int microbatches = 0;
  std::vector<int> placement;                 ///< rank of each stage
  std::vector<double> seconds[3];             ///< F, I, W of each stage
  std::vector<double> hop;                    ///< boundary s → s+1; 0 within a rank
  std::vector<double> act, stash;             ///< held from F until I, and from I until W
  std::vector<double> limit;                  ///< of each rank; kNever where memory is no matter
  std::vector<std::vector<int>> stages_of{};  ///< of each rank, ascending

  int stages() const { return static_cast<int>(placement.size()); }
  /// Derive `stages_of`; called once the rest is filled in.
  void index();
};

/// Each rank's actions as stage · 3 + kind. Actions of one stage and kind ascend in microbatches,
/// so that the n-th of them is microbatch n.
using Order = std::vector<std::vector<int32_t>>;

/// When a replay's ranks start and end; `stuck` if some rank waits for ever.
struct Spans {
  std::vector<double> first, last;
  bool stuck = false;

  double largest() const;   ///< the longest span of a rank: the stage objective
  double makespan() const;  ///< the global span: the sync objective
  double mean() const;      ///< of the ranks' spans, the sync objective's of their ends
};

/// The replay of an order: every action as early as its rank's order and its inputs allow.
class Replay {
 public:
  explicit Replay(const Problem& problem);

  const Spans& run(const Order& order);

  /// (rank, index) of the actions that the end of `rank` follows from without a gap, backwards.
  const std::vector<std::pair<int, int>>& critical(const Order& order, int rank);

 private:
  bool advance(int rank, const std::vector<int32_t>& row);

  const Problem& problem_;
  Spans spans_;
  std::vector<double> done_[3];  ///< end of each action by stage · m + microbatch; < 0: not run
  std::vector<int> count_;       ///< actions run by stage · 3 + kind
  std::vector<int> at_;
  std::vector<int> awake_;
  std::vector<char> is_awake_;
  std::vector<std::vector<int>> place_;  ///< by stage · 3 + kind: index of each microbatch
  std::vector<std::pair<int, int>> critical_;
};

/// Whether each rank keeps F, I, W of a microbatch in order and its memory inside the limit.
bool fits(const Problem& problem, const std::vector<int32_t>& row, int rank);

}  // namespace zb::schedule
