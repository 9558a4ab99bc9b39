// Private to loop: the steps that the loop on a lab job and the one on any program have in common.
#pragma once

#include "weft/loop.h"

namespace weft::loop {

using Say = std::function<void(const std::string&)>;

// Made by the first run, once its options are known to be good.
Result<void> check_folder(const std::string& path);
Paths paths_in(const std::string& folder);
// Adds those of a run, each once.
void add_remarks(const std::vector<std::string>& from, std::vector<std::string>& to,
                 const char* prefix);
Interval to_target_ms(const trace::Environment& environment, const replay::Prediction& prediction);
// Diagnoses the run before, searches a plan and predicts it: fills what `out` says of these.
Result<void> find_plan(const analysis::Analysis& before, const optimize::Options& search,
                       const Say& say, Found& out, trace::Trace& predicted);
bool same_plan(const Found& out);
void compare(const Interval& before, const Interval& after, Found& out);
Result<void> write_plans(const std::string& folder, const Found& out);

struct Page {
  std::string title;
  Interval before, after;
  std::optional<double> floor_ms;
};
Result<void> write_page(const Page& about, const analysis::Analysis& before,
                        const trace::Trace& predicted, const Found& out);

}  // namespace weft::loop
