// Which all-reduce for which size.
#include <algorithm>
#include <array>
#include <cmath>

#include "weft/schedule.h"

namespace weft::schedule {

Algorithm Choice::at(uint64_t bytes) const {
  for (const auto& [up_to, algorithm] : by_size)
    if (bytes <= up_to) return algorithm;
  return by_size.empty() ? Algorithm::ring : by_size.back().second;
}

std::optional<double> all_reduce_seconds(const cost::Costs& costs, Algorithm algorithm,
                                         double bytes, const cost::Group& group) {
  switch (algorithm) {
    case Algorithm::ring:
      return cost::ring_all_reduce_seconds(costs, bytes, group.ranks, group.lanes);
    case Algorithm::halving_doubling:
      return cost::halving_doubling_all_reduce_seconds(costs, bytes, group);
    case Algorithm::tree: return cost::tree_all_reduce_seconds(costs, bytes, group);
    case Algorithm::hierarchical: return cost::hierarchical_all_reduce_seconds(costs, bytes, group);
    case Algorithm::doubling: return cost::doubling_all_reduce_seconds(costs, bytes, group);
    case Algorithm::direct: return cost::direct_all_reduce_seconds(costs, bytes, group);
  }
  return std::nullopt;
}

Choice choose_all_reduce(const cost::Costs& costs, const cost::Group& group) {
  if (group.ranks < 2) return {};
  if (!costs.round_trip_idle_ns ||
      !cost::ring_all_reduce_seconds(costs, 1, group.ranks, group.lanes))
    return choose_all_reduce(cost::typical(), group);
  // The ring is measured best and overlaps its steps: another one must promise clearly more.
  constexpr double kWorthIt = 0.95;
  Choice choice;
  for (uint64_t bytes = 256; bytes <= 1u << 30; bytes *= 2) {
    Algorithm best = Algorithm::ring;
    double least = kWorthIt * *all_reduce_seconds(costs, best, static_cast<double>(bytes), group);
    for (Algorithm algorithm : kAlgorithms) {
      if (algorithm == Algorithm::ring) continue;
      auto seconds = all_reduce_seconds(costs, algorithm, static_cast<double>(bytes), group);
      if (!seconds || *seconds >= least) continue;
      least = *seconds;
      best = algorithm;
    }
    if (choice.by_size.empty() || choice.by_size.back().second != best)
      choice.by_size.push_back({bytes, best});
    choice.by_size.back().first = bytes;
  }
  choice.by_size.back().first = UINT64_MAX;
  return choice;
}

Choice choice_of_run(const cost::Costs& fitted, const cost::Group& group) {
  return choose_all_reduce(fitted.agreed ? *fitted.agreed : cost::typical(), group);
}

Algorithm algorithm_for(const plan::Plan& plan, uint64_t bytes, const Choice& choice) {
  for (const plan::AlgorithmRule& rule : plan.algorithm)
    if (!rule.up_to || bytes <= rule.up_to->count)
      return algorithm_named(rule.use).value_or(choice.at(bytes));
  return Algorithm::ring;
}

namespace {

// What an all-reduce takes of each constant: seconds where the constant is one of its unit.
constexpr size_t kUnknowns = 5;
using Column = std::array<double, kUnknowns>;

std::optional<Column> column_of(const Timed& timed, const cost::Group& group) {
  const cost::Fitted nothing{0, 0, 0, 1};
  cost::Costs free;
  free.link_bytes_per_s = {1e300, 1e300, 1e300, 1};
  free.round_trip_idle_ns = free.cpu_ns_per_chunk = nothing;
  free.copy_ns_per_byte = free.reduce_ns_per_byte = nothing;
  const auto ask = [&](const cost::Costs& costs) {
    return all_reduce_seconds(costs, timed.algorithm, timed.bytes, group);
  };
  if (!ask(free)) return std::nullopt;
  // Rates are bytes a second, everything else nanoseconds.
  constexpr std::pair<std::optional<cost::Fitted> cost::Costs::*, double> kUnits[kUnknowns] = {
      {&cost::Costs::round_trip_idle_ns, 1e9},
      {&cost::Costs::link_bytes_per_s, 1},
      {&cost::Costs::cpu_ns_per_chunk, 1e9},
      {&cost::Costs::copy_ns_per_byte, 1e9},
      {&cost::Costs::reduce_ns_per_byte, 1e9}};
  Column out;
  for (size_t i = 0; i < kUnknowns; ++i) {
    cost::Costs one = free;
    (one.*kUnits[i].first)->value = kUnits[i].second;
    out[i] = *ask(one);
  }
  return out;
}

// Least squares over the unknowns in `used`, by the normal equations; nullopt when they do not
// determine them.
std::optional<Column> solve(const std::vector<Column>& rows, unsigned used) {
  std::vector<size_t> which;
  for (size_t i = 0; i < kUnknowns; ++i)
    if ((used >> i & 1) != 0) which.push_back(i);
  const size_t n = which.size();
  std::vector<std::vector<double>> m(n, std::vector<double>(n + 1, 0));
  for (const Column& row : rows)
    for (size_t i = 0; i < n; ++i) {
      for (size_t j = 0; j < n; ++j) m[i][j] += row[which[i]] * row[which[j]];
      m[i][n] += row[which[i]];  // each row is of one measurement, divided by it
    }
  // Seconds and bytes differ by ten orders of magnitude: compare with each one's own size.
  std::vector<double> size(n);
  for (size_t i = 0; i < n; ++i) {
    if (!(m[i][i] > 0)) return std::nullopt;
    size[i] = std::sqrt(m[i][i]);
  }
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < n; ++j) m[i][j] /= size[i] * size[j];
    m[i][n] /= size[i];
  }
  for (size_t i = 0; i < n; ++i) {
    if (m[i][i] < 1e-9) return std::nullopt;
    for (size_t j = i + 1; j < n; ++j) {
      const double factor = m[j][i] / m[i][i];
      for (size_t k = i; k <= n; ++k) m[j][k] -= factor * m[i][k];
    }
  }
  Column out{};
  for (size_t i = n; i-- > 0;) {
    double value = m[i][n];
    for (size_t j = i + 1; j < n; ++j) value -= m[i][j] * out[which[j]] * size[j];
    out[which[i]] = value / m[i][i] / size[i];
  }
  return out;
}

double badness(const std::vector<Column>& rows, const Column& constants) {
  double sum = 0;
  for (const Column& row : rows) {
    double off = -1;
    for (size_t i = 0; i < kUnknowns; ++i) off += row[i] * constants[i];
    sum += off * off;
  }
  return sum;
}

}  // namespace

Result<cost::Costs> fit_all_reduces(std::span<const Timed> timed, const cost::Group& group) {
  std::vector<Column> rows;
  for (const Timed& one : timed) {
    auto column = column_of(one, group);
    if (!column || !(one.seconds > 0)) continue;
    for (double& value : *column) value /= one.seconds;  // relative errors count, not absolute ones
    rows.push_back(*column);
  }
  // No constant can be negative: of all sets of them that come out positive, the best fit.
  std::optional<Column> best;
  for (unsigned used = 0; used < 1u << kUnknowns; ++used) {
    if ((used & 2) == 0) continue;  // the rate is always there
    auto found = solve(rows, used);
    if (!found || std::any_of(found->begin(), found->end(), [](double x) { return x < 0; }))
      continue;
    if (!best || badness(rows, *found) < badness(rows, *best)) best = found;
  }
  if (!best || !((*best)[1] > 0))
    return error(Code::invalid_argument,
                 "no constants fit these times: measure more sizes, on a machine that is quieter");
  const auto fitted = [&](double value) {
    return cost::Fitted{value, value, value, static_cast<uint32_t>(rows.size())};
  };
  cost::Costs costs;
  costs.round_trip_idle_ns = fitted((*best)[0] * 1e9);
  costs.link_bytes_per_s = fitted(1 / (*best)[1]);
  costs.cpu_ns_per_chunk = fitted((*best)[2] * 1e9);
  if (group.hosts > 1 && (*best)[3] > 0) costs.copy_ns_per_byte = fitted((*best)[3] * 1e9);
  costs.reduce_ns_per_byte = fitted((*best)[4] * 1e9);
  return costs;
}

}  // namespace weft::schedule
