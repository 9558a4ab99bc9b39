// The sections of the page, each appended as HTML. A section with nothing to say adds nothing.
#pragma once

#include <string>

#include "weft/report.h"

namespace weft::report {

// From wall time and real bytes of a run to those of the target.
struct Scale {
  Scale();  // one to one
  explicit Scale(const trace::Environment* known);

  const trace::Environment* environment;  // never null

  double ms(double wall_ns) const { return environment->to_target_ns(wall_ns) * 1e-6; }
  double bytes(double real) const { return environment->to_target_bytes(real); }
  // Bytes a second of wall time -> bits a second of the target.
  double bits_per_s(double bytes_per_s) const {
    const double second = environment->to_target_ns(1e9) * 1e-9;
    return second > 0 ? environment->to_target_bytes(bytes_per_s) * 8 / second : 0;
  }
};
Scale scale_of(const Run& run);
// Of the first run that has a trace: what the optimizer's figures refer to.
Scale scale_of(const Page& page);

// Was this run made by the replayer?
bool is_predicted(const Run& run);

// What the runs are to each other. Any may be absent.
struct Roles {
  const Run* before = nullptr;     // the first measured one
  const Run* after = nullptr;      // the last measured one, if there are two
  const Run* predicted = nullptr;  // the last predicted one
};
Roles roles_of(const Page& page);

// The page in one sentence, as plain text.
std::string verdict_of(const Page& page);

void put_runs(std::string& out, const Page& page);
void put_time(std::string& out, const Page& page);
void put_findings(std::string& out, const Page& page);
void put_gains(std::string& out, const Page& page);
void put_plan(std::string& out, const Page& page);
void put_details(std::string& out, const Page& page);
void put_remarks(std::string& out, const Page& page);

}  // namespace weft::report
