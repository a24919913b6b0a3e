#include "python.hpp"

#include <pybind11/stl.h>

#include <memory>
#include <string>

#include "anneal.hpp"
#include "lister.hpp"

namespace py = pybind11;

namespace zb::schedule {

namespace {

using Numbers = std::vector<double>;

/// An order, kept on this side; Python sees a handle and asks for rows when it wants them.
struct Held {
  Order order;
};

std::shared_ptr<Problem> make_problem(int ranks, int microbatches, std::vector<int> placement,
                                      Numbers f, Numbers i, Numbers w, Numbers hop, Numbers act,
                                      Numbers stash, Numbers limit) {
  const size_t stages = placement.size();
  for (const Numbers* given : {&f, &i, &w, &act, &stash}) {
    if (given->size() != stages) throw py::value_error("one number a stage");
  }
  if (stages == 0 || hop.size() + 1 != stages || limit.size() != static_cast<size_t>(ranks)) {
    throw py::value_error("stages, boundaries or ranks do not match");
  }
  for (int rank : placement) {
    if (rank < 0 || rank >= ranks) throw py::value_error("a stage is on no rank");
  }
  auto problem = std::make_shared<Problem>();
  problem->ranks = ranks;
  problem->microbatches = microbatches;
  problem->placement = std::move(placement);
  problem->seconds[kForward] = std::move(f);
  problem->seconds[kInputGrad] = std::move(i);
  problem->seconds[kWeightGrad] = std::move(w);
  problem->hop = std::move(hop);
  problem->act = std::move(act);
  problem->stash = std::move(stash);
  problem->limit = std::move(limit);
  problem->index();
  return problem;
}

Policy make_policy(const Problem& problem, Numbers forward_key, Numbers backward_key,
                   double interval, double patience, double gap, bool strict,
                   std::vector<int> flight, std::vector<int> backlog) {
  const size_t stages = problem.placement.size();
  if (forward_key.size() != stages || backward_key.size() != stages || flight.size() != stages ||
      backlog.size() != static_cast<size_t>(problem.ranks)) {
    throw py::value_error("keys and flight: one a stage; backlog: one a rank");
  }
  return {std::move(forward_key), std::move(backward_key), interval, patience, gap, strict,
          std::move(flight),      std::move(backlog)};
}

/// (largest span, makespan, mean span) of an order, or None if it is stuck.
py::object replay(const Problem& problem, const Held& held) {
  Replay replay(problem);
  const Spans& spans = replay.run(held.order);
  if (spans.stuck) return py::none();
  return py::make_tuple(spans.largest(), spans.makespan(), spans.mean());
}

py::object list_order(const Problem& problem, Numbers forward_key, Numbers backward_key,
                      double interval, double patience, double gap, bool strict,
                      std::vector<int> flight, std::vector<int> backlog) {
  const Policy policy =
      make_policy(problem, std::move(forward_key), std::move(backward_key), interval, patience, gap,
                  strict, std::move(flight), std::move(backlog));
  Order order;
  {
    py::gil_scoped_release release;
    order = list(problem, policy);
  }
  if (order.empty()) return py::none();
  return py::cast(std::make_shared<Held>(Held{std::move(order)}));
}

std::shared_ptr<Held> make_order(const Problem& problem, Order rows) {
  if (rows.size() != static_cast<size_t>(problem.ranks)) throw py::value_error("one row a rank");
  for (int r = 0; r < problem.ranks; ++r) {
    for (int32_t code : rows[r]) {
      if (code < 0 || code / 3 >= problem.stages() || problem.placement[code / 3] != r) {
        throw py::value_error("an action of a stage that is not on its rank");
      }
    }
  }
  return std::make_shared<Held>(Held{std::move(rows)});
}

bool order_fits(const Problem& problem, const Held& held) {
  for (int r = 0; r < problem.ranks; ++r) {
    if (!fits(problem, held.order[r], r)) return false;
  }
  return true;
}

std::shared_ptr<Held> anneal_order(const Problem& problem, const Held& held, bool sync,
                                   int64_t moves, uint64_t seed, double heat, double seconds,
                                   double share) {
  const Annealing how{sync, moves, seed, heat, share, seconds};
  py::gil_scoped_release release;
  return std::make_shared<Held>(Held{anneal(problem, held.order, how)});
}

}  // namespace

void bind(py::module_& m) {
  py::module_ s = m.def_submodule("schedule", "List scheduling, replay and local search.");
  py::class_<Problem, std::shared_ptr<Problem>>(s, "Problem")
      .def(py::init(&make_problem), py::kw_only(), py::arg("ranks"), py::arg("microbatches"),
           py::arg("placement"), py::arg("f"), py::arg("i"), py::arg("w"), py::arg("hop"),
           py::arg("act"), py::arg("stash"), py::arg("limit"));
  py::class_<Held, std::shared_ptr<Held>>(s, "Order")
      .def(py::init(&make_order), py::arg("problem"), py::arg("rows"))
      .def_property_readonly(
          "rows", [](const Held& held) { return held.order; },
          "Per rank the actions as stage * 3 + (F 0, I 1, W 2).");
  s.def("list", &list_order, py::arg("problem"), py::kw_only(), py::arg("forward_key"),
        py::arg("backward_key"), py::arg("interval"), py::arg("patience"), py::arg("gap"),
        py::arg("strict"), py::arg("flight"), py::arg("backlog"));
  s.def("replay", &replay, py::arg("problem"), py::arg("order"));
  s.def("fits", &order_fits, py::arg("problem"), py::arg("order"));
  s.def("anneal", &anneal_order, py::arg("problem"), py::arg("order"), py::kw_only(),
        py::arg("sync"), py::arg("moves"), py::arg("seed"), py::arg("heat"), py::arg("seconds"),
        py::arg("share") = .05);
}

}  // namespace zb::schedule
