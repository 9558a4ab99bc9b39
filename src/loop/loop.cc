// The loop on a job of the lab.
#include "weft/loop.h"

#include "parts.h"

namespace weft::loop {
namespace {

// The same job under the new plan. A plan that does the same is not run again.
Result<void> run_again(const Options& options, const Say& say, Outcome& out) {
  if (same_plan(out)) {
    out.after = out.before;
    out.paths.after = out.paths.before;
    out.kept_old = true;
    out.remarks.push_back("no better plan was found: the old one stays, and was not run again");
    return {};
  }
  say(text("running under the new plan, predicted %.1f ms", out.predicted_ms.value));
  lab::RunOptions again = options.lab;
  again.plan = out.optimized.plan;
  again.output = out.paths.after;
  again.dilation = out.before.dilation;
  again.shrink = out.before.shrink;
  auto after = lab::run(again, say);
  if (!after) return std::move(after).error().in("the run under the new plan");
  out.after = std::move(*after);
  return {};
}

}  // namespace

Result<Outcome> run(const Options& options, const Say& progress) {
  if (options.lab.engine != lab::Engine::weft)
    return error(Code::unsupported,
                 "the loop needs weft's own engine: only it records and obeys a "
                 "plan");
  if (!options.lab.record) return error(Code::invalid_argument, "the loop needs what runs record");
  if (options.lab.compute_only)
    return error(Code::invalid_argument,
                 "a run without communication has nothing that a plan could change");
  const Say say = progress ? progress : [](const std::string&) {};
  WEFT_TRY(check_folder(options.output));

  Outcome out;
  out.paths = paths_in(options.output);
  out.plan_before = options.lab.plan;
  lab::RunOptions first = options.lab;
  first.output = out.paths.before;
  say("running under plan " + first.plan.name);
  WEFT_ASSIGN(out.before, lab::run(first, say));

  say("reading, aligning and replaying what was recorded");
  WEFT_ASSIGN(analysis::Analysis before, analysis::analyze(out.paths.before));
  trace::Trace predicted;
  WEFT_TRY(find_plan(before, options.optimize, say, out, predicted));

  WEFT_TRY(run_again(options, say, out));
  compare(out.before.iteration_ms, out.after.iteration_ms, out);
  add_remarks(out.before.remarks, out.remarks, "before: ");
  add_remarks(out.after.remarks, out.remarks, "after: ");
  add_remarks(out.optimized.remarks, out.remarks, "");
  WEFT_TRY(write_plans(options.output, out));
  say("writing the page");
  const Page page{
      text("%s on %u hosts", before.recorded.graph.model.name.c_str(), options.lab.hosts),
      out.before.iteration_ms, out.after.iteration_ms, out.before.floor_ms};
  WEFT_TRY(write_page(page, before, predicted, out));
  WEFT_TRY(write_file(options.output + "/loop.json", json(out)));
  return out;
}

}  // namespace weft::loop
