// Private to cli: the options that `weft lab run` and `weft lab loop` share.
#pragma once

#include <string>
#include <vector>

#include "verb.h"
#include "weft/lab.h"

namespace weft::cli {

// As typed; understood() makes sense of them.
struct LabOptions {
  lab::RunOptions run;
  std::string link = "25gbit";
  std::string flow;
  std::string plan = "default";
  std::vector<std::string> slow;
  std::vector<std::string> clock;
  std::vector<std::string> lane_rate;
  double dilation = 0;
  double shrink = 0;
  bool no_probe = false;
};

// Adds all but the plan and the output, which have other names in other verbs.
// REQUIRES: `options` lives as long as `verb`.
void add_lab_options(CLI::App& verb, LabOptions& options);
Result<lab::RunOptions> understood(const LabOptions& options);

// `weft lab loop`, in verb_loop.cc.
void add_lab_loop(CLI::App& group, Context& context);

}  // namespace weft::cli
