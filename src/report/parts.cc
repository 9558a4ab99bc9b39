#include "parts.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "text.h"

namespace weft::report {
namespace {

constexpr size_t kFindingsMax = 50;
constexpr size_t kLinesMax = 200;  // of evidence, remarks and the like

void open_section(std::string& out, const char* id, const char* title) {
  out += text("<section aria-labelledby=\"h-%s\">\n<h2 id=\"h-%s\">%s</h2>\n", id, id, title);
}

std::string interval(double low, double high) {
  if (!(low > 0) || !(high > 0) || !(high >= low)) return "–";
  return figure(low) + " to " + figure(high);
}

// "5.1 times faster" for 1397 -> 275.6.
std::string compared(double before_ms, double after_ms) {
  const double ratio = before_ms / after_ms;
  if (!std::isfinite(ratio) || ratio <= 0) return "not comparable";
  const double factor = std::max(ratio, 1 / ratio);
  const char* way = ratio >= 1 ? "faster" : "slower";
  if (factor < 1.005) return "no difference";
  return factor < 1.5 ? text("%.1f %% %s", std::fabs(after_ms / before_ms - 1) * 100, way)
                      : text("%.1f times %s", factor, way);
}

// Do the intervals of two runs touch, so that a small difference says nothing?
bool within_spread(const Run& a, const Run& b) {
  if (!(a.high_ms > 0) || !(b.high_ms > 0)) return false;
  return a.low_ms <= b.high_ms && b.low_ms <= a.high_ms;
}

// By gain, largest first.
std::vector<const diagnose::Finding*> ranked(const std::vector<diagnose::Finding>& findings) {
  std::vector<const diagnose::Finding*> out;
  out.reserve(findings.size());
  for (const diagnose::Finding& finding : findings) out.push_back(&finding);
  const auto gain = [](const diagnose::Finding* finding) {
    return std::isfinite(finding->gain_percent) ? finding->gain_percent : 0;
  };
  std::stable_sort(out.begin(), out.end(),
                   [&](const auto* a, const auto* b) { return gain(a) > gain(b); });
  return out;
}

std::string largest_cause(const Run& run) {
  if (run.diagnosis == nullptr || run.diagnosis->findings.empty()) return "";
  const diagnose::Finding& first = *ranked(run.diagnosis->findings).front();
  return "; without its largest cause " + in_percent(first.gain_percent) +
         " shorter: " + clean(first.title, 200);
}

// Runs with a diagnosis, in order.
std::vector<const Run*> diagnosed(const Page& page) {
  std::vector<const Run*> out;
  for (const Run& run : page.runs)
    if (run.diagnosis != nullptr) out.push_back(&run);
  return out;
}

std::string shown_part(const std::string& part) {
  const auto words = diagnose::words_of(part);
  return words ? words->name : escaped(part, 60);
}

// A class for the colour of a part; parts that are not known share one.
std::string class_of(const std::string& part) {
  return diagnose::words_of(part) ? "p-" + part : "p-other";
}

double width_of(double part, double whole) {
  const double percent = part / whole * 100;
  return std::isfinite(percent) ? std::clamp(percent, 0.0, 100.0) : 0;
}

void put_list(std::string& out, const std::vector<std::string>& lines) {
  out += "<ul>\n";
  for (size_t i = 0; i < lines.size() && i < kLinesMax; ++i)
    out += "<li>" + escaped(lines[i]) + "</li>\n";
  if (lines.size() > kLinesMax)
    out += "<li>" + grouped(lines.size() - kLinesMax) + " more left out</li>\n";
  out += "</ul>\n";
}

}  // namespace

// ---- what the runs are ---------------------------------------------------------------------

namespace {
const trace::Environment kNoEnvironment;
}  // namespace

Scale::Scale() : environment(&kNoEnvironment) {}
Scale::Scale(const trace::Environment* known) : environment(known) {}

Scale scale_of(const Run& run) {
  if (run.trace == nullptr || run.trace->processes.empty()) return {};
  return Scale(&run.trace->processes.front().environment);
}

Scale scale_of(const Page& page) {
  for (const Run& run : page.runs)
    if (run.trace != nullptr && !run.trace->processes.empty()) return scale_of(run);
  return {};
}

bool is_predicted(const Run& run) {
  if (run.trace != nullptr && !run.trace->processes.empty())
    return run.trace->processes.front().environment.predicted;
  return run.label.find("predicted") != std::string::npos;
}

Roles roles_of(const Page& page) {
  Roles roles;
  for (const Run& run : page.runs) {
    if (is_predicted(run))
      roles.predicted = &run;
    else if (roles.before == nullptr)
      roles.before = &run;
    else
      roles.after = &run;
  }
  return roles;
}

std::string verdict_of(const Page& page) {
  const Roles roles = roles_of(page);
  const Run* now = roles.after != nullptr ? roles.after : roles.before;
  if (now == nullptr)
    return "Predicted: " + in_ms(roles.predicted->iteration_ms) + " an iteration.";
  std::string out = in_ms(now->iteration_ms) + " an iteration";
  if (roles.after != nullptr) {
    out += " instead of " + in_ms(roles.before->iteration_ms) + ": ";
    const double ratio = roles.before->iteration_ms / now->iteration_ms;
    const bool noise = within_spread(*roles.before, *now) && std::fabs(ratio - 1) < 0.05;
    out += noise ? "no difference beyond the spread of iterations"
                 : compared(roles.before->iteration_ms, now->iteration_ms);
    if (roles.predicted != nullptr) out += "; predicted " + in_ms(roles.predicted->iteration_ms);
    if (page.prediction_error_percent)
      out += text(", off by %+.1f %%", *page.prediction_error_percent);
  } else if (roles.predicted != nullptr) {
    out += "; predicted " + in_ms(roles.predicted->iteration_ms) +
           " with the plan: " + compared(now->iteration_ms, roles.predicted->iteration_ms) +
           ", not measured yet";
  } else {
    out += largest_cause(*now);
  }
  return out + ".";
}

// ---- before, after, predicted --------------------------------------------------------------

void put_runs(std::string& out, const Page& page) {
  const Roles roles = roles_of(page);
  open_section(out, "runs", "One iteration");
  out +=
      "<div class=\"wide\"><table class=\"runs\">\n<thead><tr><th scope=\"col\">run</th>"
      "<th scope=\"col\" class=\"n\">ms</th><th scope=\"col\" class=\"n\">interval, ms</th>"
      "<th scope=\"col\">compared with the first</th></tr></thead>\n<tbody>\n";
  for (const Run& run : page.runs) {
    const bool first = &run == roles.before || roles.before == nullptr;
    out += "<tr><th scope=\"row\">" + escaped(run.label) + "</th><td class=\"n\"><b>" +
           figure(run.iteration_ms) + "</b></td><td class=\"n\">" +
           interval(run.low_ms, run.high_ms) + "</td><td>" +
           (first ? "" : compared(roles.before->iteration_ms, run.iteration_ms)) + "</td></tr>\n";
  }
  if (page.floor_ms) {
    out +=
        "<tr class=\"floor\"><th scope=\"row\">floor <span class=\"soft\">no plan passes the "
        "larger of compute and wire</span></th><td class=\"n\"><b>" +
        figure(*page.floor_ms) + "</b></td><td class=\"n\">–</td><td>" +
        (roles.before != nullptr ? compared(roles.before->iteration_ms, *page.floor_ms) : "") +
        "</td></tr>\n";
  }
  out += "</tbody></table></div>\n";
  std::string trust;
  if (page.prediction_error_percent)
    trust += text("The prediction was off by %+.1f %%. ", *page.prediction_error_percent);
  if (page.self_replay_error_percent)
    trust +=
        text("Replaying the recorded plan is off by %+.1f %%. ", *page.self_replay_error_percent);
  if (!trust.empty()) out += "<p class=\"soft\">" + trust + "</p>\n";
  out += "</section>\n";
}

// ---- where the time went -------------------------------------------------------------------

namespace {

// Parts of all runs, each once, in the order in which they first stand.
std::vector<std::string> parts_of(const std::vector<const Run*>& runs) {
  std::vector<std::string> parts;
  for (const Run* run : runs)
    for (const diagnose::Share& share : run->diagnosis->path)
      if (std::find(parts.begin(), parts.end(), share.what) == parts.end() && parts.size() < 32)
        parts.push_back(share.what);
  return parts;
}

std::string meaning_of(const std::string& part) {
  const auto words = diagnose::words_of(part);
  return words ? std::string("<span class=\"meaning\">") + words->meaning + "</span>" : "";
}

void put_bar(std::string& out, const Run& run, double widest_ms) {
  const Scale scale = scale_of(run);
  out += "<div class=\"bar-row\"><span class=\"bar-label\">" + escaped(run.label) +
         "</span><div class=\"bar\">";
  for (const diagnose::Share& share : run.diagnosis->path) {
    const double ms = scale.ms(share.ns);
    const double width = width_of(ms, widest_ms);
    if (width < 0.05) continue;
    out += text("<span class=\"%s\" style=\"width:%.3f%%\" title=\"%s: %s\">%s</span>",
                class_of(share.what).c_str(), width, shown_part(share.what).c_str(),
                in_ms(ms).c_str(), width > 6 ? figure(ms).c_str() : "");
  }
  out += "</div></div>\n";
}

}  // namespace

void put_time(std::string& out, const Page& page) {
  const std::vector<const Run*> runs = diagnosed(page);
  const std::vector<std::string> parts = parts_of(runs);
  if (parts.empty()) return;
  double widest_ms = 0;
  for (const Run* run : runs) {
    double total = 0;
    for (const diagnose::Share& share : run->diagnosis->path) total += scale_of(*run).ms(share.ns);
    widest_ms = std::max(widest_ms, total);
  }
  open_section(out, "time", "Where the time went");
  out +=
      "<p class=\"hint\">What lay on the critical path across all ranks, so the parts add up to "
      "the iteration.</p>\n<div class=\"bars\" aria-hidden=\"true\">\n";
  for (const Run* run : runs) put_bar(out, *run, widest_ms);
  out += "</div>\n<div class=\"wide\"><table class=\"path\">\n<thead><tr><th scope=\"col\">ms</th>";
  for (const Run* run : runs)
    out += "<th scope=\"col\" class=\"n\">" + escaped(run->label) + "</th>";
  out += "</tr></thead>\n<tbody>\n";
  for (const std::string& part : parts) {
    out += "<tr><th scope=\"row\"><i class=\"swatch " + class_of(part) + "\"></i>" +
           shown_part(part) + meaning_of(part) + "</th>";
    for (const Run* run : runs) {
      const auto& path = run->diagnosis->path;
      const auto at = std::find_if(path.begin(), path.end(),
                                   [&](const diagnose::Share& s) { return s.what == part; });
      out += at == path.end()
                 ? "<td class=\"n\">–</td>"
                 : "<td class=\"n\">" + fixed(scale_of(*run).ms(at->ns), 1) +
                       " <span class=\"soft\">" + in_percent(at->percent) + "</span></td>";
    }
    out += "</tr>\n";
  }
  out += "</tbody></table></div>\n</section>\n";
}

// ---- findings ------------------------------------------------------------------------------

namespace {

void put_finding(std::string& out, const diagnose::Finding& finding, const Run& run) {
  out += "<li class=\"card\"><div class=\"gain\"><b>" + in_percent(finding.gain_percent) + "</b>";
  out += "<span>" + in_ms(run.iteration_ms * finding.gain_percent / 100) + " to gain</span>";
  if (finding.high > finding.low)
    out += "<span>" + text("%.1f to %.1f %%", finding.low, finding.high) + "</span>";
  out += "</div><div class=\"what\"><h3>" + escaped(finding.title) +
         "</h3><p class=\"soft\"><code>" + escaped(finding.name, 80) + "</code>";
  if (finding.rank) out += text(" on rank %u", *finding.rank);
  out += "</p>\n";
  if (!finding.evidence.empty()) put_list(out, finding.evidence);
  if (!finding.remedy.empty())
    out += "<p class=\"remedy\"><b>What to do:</b> " + escaped(finding.remedy) + "</p>";
  out += "</div></li>\n";
}

void put_findings_of(std::string& out, const Run& run) {
  const diagnose::Diagnosis& diagnosis = *run.diagnosis;
  const std::vector<const diagnose::Finding*> findings = ranked(diagnosis.findings);
  if (findings.empty()) {
    out += "<p>No cause whose removal would gain more than the replay's own error (" +
           in_percent(diagnosis.fidelity_error_percent) + ").</p>\n";
  } else {
    out += "<ol class=\"cards\">\n";
    for (size_t i = 0; i < findings.size() && i < kFindingsMax; ++i)
      put_finding(out, *findings[i], run);
    out += "</ol>\n";
    if (findings.size() > kFindingsMax)
      out += "<p>" + grouped(findings.size() - kFindingsMax) + " more left out.</p>\n";
  }
  if (!diagnosis.rejected.empty()) {
    out += "<details><summary>Tried, and did not pay</summary>\n";
    put_list(out, diagnosis.rejected);
    out += "</details>\n";
  }
}

}  // namespace

void put_findings(std::string& out, const Page& page) {
  const std::vector<const Run*> runs = diagnosed(page);
  if (runs.empty()) return;
  open_section(out, "findings", "Findings");
  out +=
      "<p class=\"hint\">Each is judged by a replay of a world without it; the gains of several "
      "do not add up.</p>\n";
  for (const Run* run : runs) {
    const bool first = run == runs.front();
    if (!first && run->diagnosis->findings.empty() && run->diagnosis->rejected.empty()) continue;
    if (runs.size() == 1) {
      put_findings_of(out, *run);
      continue;
    }
    out += text("<details%s class=\"of-run\"><summary>", first ? " open" : "") +
           escaped(run->label) + "</summary>\n";
    put_findings_of(out, *run);
    out += "</details>\n";
  }
  out += "</section>\n";
}

// ---- what could be gained ------------------------------------------------------------------

namespace {

void put_bounds(std::string& out, const std::vector<const Run*>& runs) {
  const bool any = std::any_of(runs.begin(), runs.end(),
                               [](const Run* run) { return !run->diagnosis->bounds.empty(); });
  if (!any) return;
  out +=
      "<div class=\"wide\"><table>\n<caption>In a world where …</caption>\n<thead><tr>"
      "<th scope=\"col\">bound</th><th scope=\"col\">run</th><th scope=\"col\" class=\"n\">an "
      "iteration takes, ms</th><th scope=\"col\" class=\"n\">gain</th></tr></thead>\n<tbody>\n";
  for (const Run* run : runs) {
    size_t shown = 0;
    for (const diagnose::Bound& bound : run->diagnosis->bounds) {
      if (++shown > kLinesMax) break;
      out += "<tr><th scope=\"row\">" + escaped(bound.name) + "</th><td>" + escaped(run->label) +
             "</td><td class=\"n\">" + figure(scale_of(*run).ms(bound.iteration_ns)) +
             "</td><td class=\"n\">" + in_percent(bound.gain_percent) + "</td></tr>\n";
    }
  }
  out += "</tbody></table></div>\n";
}

std::string of_whole(double part, double whole) {
  return whole > 0 ? " <span class=\"soft\">" + in_percent(part / whole * 100) + "</span>" : "";
}

void put_overlap(std::string& out, const std::vector<const Run*>& runs) {
  out +=
      "<div class=\"wide\"><table>\n<caption>Communication behind compute</caption>\n<thead><tr>"
      "<th scope=\"col\">run</th><th scope=\"col\" class=\"n\">communication, ms</th>"
      "<th scope=\"col\" class=\"n\">overlapped</th><th scope=\"col\" class=\"n\">possible</th>"
      "<th scope=\"col\" class=\"n\">devices stood still</th></tr></thead>\n<tbody>\n";
  for (const Run* run : runs) {
    const diagnose::Diagnosis& d = *run->diagnosis;
    const Scale scale = scale_of(*run);
    out += "<tr><th scope=\"row\">" + escaped(run->label) + "</th><td class=\"n\">" +
           figure(scale.ms(d.communication_ns)) + "</td><td class=\"n\">" +
           figure(scale.ms(d.overlapped_ns)) + of_whole(d.overlapped_ns, d.communication_ns) +
           "</td><td class=\"n\">" + figure(scale.ms(d.overlap_possible_ns)) +
           of_whole(d.overlap_possible_ns, d.communication_ns) + "</td><td class=\"n\">" +
           figure(scale.ms(d.exposed_ns)) + "</td></tr>\n";
  }
  out += "</tbody></table></div>\n";
}

}  // namespace

void put_gains(std::string& out, const Page& page) {
  const std::vector<const Run*> runs = diagnosed(page);
  if (runs.empty()) return;
  open_section(out, "gains", "What could be gained");
  put_bounds(out, runs);
  put_overlap(out, runs);
  out += "</section>\n";
}

// ---- the plan ------------------------------------------------------------------------------

namespace {

void put_decisions(std::string& out, const std::vector<optimize::Decision>& decisions) {
  out +=
      "<div class=\"wide\"><table class=\"decisions\">\n<thead><tr><th scope=\"col\">field</th>"
      "<th scope=\"col\">before</th><th scope=\"col\">after</th><th scope=\"col\">why</th></tr>"
      "</thead>\n<tbody>\n";
  for (size_t i = 0; i < decisions.size() && i < kLinesMax; ++i) {
    const optimize::Decision& d = decisions[i];
    out += "<tr><th scope=\"row\"><code>" + escaped(d.field) + "</code></th><td><code>" +
           escaped(d.before) + "</code></td><td><code>" + escaped(d.after) + "</code></td><td>" +
           escaped(d.why) + "</td></tr>\n";
  }
  out += "</tbody></table></div>\n";
  if (decisions.size() > kLinesMax)
    out += "<p>" + grouped(decisions.size() - kLinesMax) + " more left out.</p>\n";
}

// Without an optimizer: how the plan differs from the one that the first run used.
std::vector<optimize::Decision> differences(const Page& page) {
  std::vector<optimize::Decision> out;
  const Result<plan::Plan> before = plan::parse(scale_of(page).environment->plan_text);
  if (!before) return out;
  for (const plan::Difference& d : plan::diff(*before, *page.plan))
    out.push_back({d.path, d.before, d.after, ""});
  return out;
}

void put_search(std::string& out, const optimize::Optimized& optimized, const Scale& scale) {
  out += "<p>Replayed, an iteration goes from " + in_ms(scale.ms(optimized.before.iteration_ns)) +
         " to " + in_ms(scale.ms(optimized.after.iteration_ns));
  if (optimized.after.high_ns > optimized.after.low_ns)
    out +=
        " (" + interval(scale.ms(optimized.after.low_ns), scale.ms(optimized.after.high_ns)) + ")";
  if (optimized.bound_ns > 0)
    out += "; with free communication it would be " + in_ms(scale.ms(optimized.bound_ns));
  out += ". The search took " + figure(optimized.seconds) + " s and " + grouped(optimized.replays) +
         " replays; " +
         (optimized.finished ? "it came to its end.</p>\n" : "its budget ended it.</p>\n");
}

void put_passes(std::string& out, const std::vector<optimize::PassUse>& passes) {
  if (passes.empty()) return;
  out +=
      "<details><summary>What the search tried</summary>\n<div class=\"wide\"><table>\n<thead>"
      "<tr><th scope=\"col\">pass</th><th scope=\"col\" class=\"n\">tried</th>"
      "<th scope=\"col\" class=\"n\">kept</th><th scope=\"col\" class=\"n\">seconds</th></tr>"
      "</thead>\n<tbody>\n";
  for (const optimize::PassUse& pass : passes)
    out += "<tr><th scope=\"row\">" + escaped(pass.name) +
           text("</th><td class=\"n\">%u</td><td class=\"n\">%u</td><td class=\"n\">%s</td></tr>\n",
                pass.tried, pass.kept, figure(pass.seconds).c_str());
  out += "</tbody></table></div></details>\n";
}

}  // namespace

void put_plan(std::string& out, const Page& page) {
  const plan::Plan* plan = page.plan;
  if (plan == nullptr && page.optimized != nullptr) plan = &page.optimized->plan;
  if (plan == nullptr) return;
  open_section(out, "plan", "The plan");
  if (page.optimized != nullptr) {
    put_search(out, *page.optimized, scale_of(page));
    if (!page.optimized->decisions.empty()) put_decisions(out, page.optimized->decisions);
    put_passes(out, page.optimized->passes);
  } else {
    const std::vector<optimize::Decision> changes = differences(page);
    if (!changes.empty()) put_decisions(out, changes);
  }
  out += "<details><summary>The whole plan, <code>" + escaped(plan->name) +
         "</code></summary>\n<pre>" + escaped(plan::canonical(*plan), 200'000) +
         "</pre></details>\n</section>\n";
}

// ---- remarks -------------------------------------------------------------------------------

void put_remarks(std::string& out, const Page& page) {
  std::vector<std::string> remarks;
  std::set<std::string> seen;
  const auto add = [&](const std::string& line) {
    if (seen.insert(line).second) remarks.push_back(line);
  };
  const trace::Environment& environment = *scale_of(page).environment;
  if (environment.dilation != 1 || environment.shrink != 1)
    add(
        text("A lab slowed time by %g and shrank sizes by %g; all times and sizes on this page are "
             "those of the cluster that it stands for.",
             environment.dilation, environment.shrink));
  for (const std::string& line : page.remarks) add(line);
  for (const Run& run : page.runs) {
    if (run.diagnosis != nullptr)
      for (const std::string& line : run.diagnosis->remarks) add(line);
    if (run.trace == nullptr) continue;
    uint64_t dropped = 0;
    for (const trace::Process& process : run.trace->processes) dropped += process.dropped;
    if (dropped > 0) add(run.label + ": " + grouped(dropped) + " records had no room and are lost");
    if (!run.trace->damage.empty())
      add(run.label + text(": %zu of its files are not whole", run.trace->damage.size()));
  }
  if (page.optimized != nullptr) {
    for (const std::string& line : page.optimized->remarks) add(line);
    for (const std::string& line : page.optimized->after.unknown) add("unknown: " + line);
    for (const std::string& line : page.optimized->after.assumed) add("assumed: " + line);
  }
  if (remarks.empty()) return;
  open_section(out, "remarks", "Remarks");
  put_list(out, remarks);
  out += "</section>\n";
}

}  // namespace weft::report
