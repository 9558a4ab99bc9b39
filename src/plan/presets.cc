// The plans that weft brings along. docs/plan_format.md gives the reason for every value.

#include "internal.h"
#include "weft/plan.h"

namespace weft::plan {

namespace {

// What a user of DistributedDataParallel over Gloo has today; every other field is already so in
// a Plan that says nothing.
Plan ddp() {
  Plan plan;
  plan.name = "ddp";
  plan.comment = "PyTorch DDP over Gloo: buckets of 25 MiB after a first of 1 MiB, one connection";
  plan.bucket_rule = {mib(1), mib(25), true};
  return plan;
}

// One fusion buffer, filled with whatever is ready, and never more than it holds.
Plan horovod() {
  Plan plan;
  plan.name = "horovod";
  plan.comment = "Horovod: one fusion buffer of 128 MiB, one connection";
  plan.bucket_rule = {mib(128), mib(128), false};
  return plan;
}

// What an expert would choose before there is a trace to choose from.
Plan expert() {
  Plan plan;
  plan.name = "default";
  plan.comment = "A start without a trace: small pieces, first needed first, eight lanes";
  plan.bucket_rule = {mib(4), mib(4), false};
  plan.partition = mib(4);
  plan.order = Order::layer;
  plan.credit = mib(32);
  plan.barrier = Barrier::tensor;
  plan.lanes = 8;
  plan.chunk = kib(512);
  return plan;
}

}  // namespace

std::vector<std::string> preset_names() { return {"ddp", "default", "horovod"}; }

Result<Plan> preset(const std::string& name) {
  if (name == "ddp") return ddp();
  if (name == "default") return expert();
  if (name == "horovod") return horovod();
  return error(Code::not_found, "no preset is named %s; expected %s", in_quotes(name).c_str(),
               one_of(name, preset_names()).c_str());
}

}  // namespace weft::plan
