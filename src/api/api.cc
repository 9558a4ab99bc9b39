#include "weft/api.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

namespace weft::api {

using membership::shown;

namespace {

constexpr const char* kTensorTypes = "tensor_types";  // the key of a note
constexpr uint32_t kLayersMax = 65535;                // a trace counts layers in 16 bits
constexpr Nanos kTimeoutMax = Nanos::from_seconds(30.0 * 24 * 3600);  // a moment plus it is one

std::optional<std::string> variable_of_process(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

Result<membership::Membership> find_membership(const membership::Lookup& lookup) {
  if (membership::launcher(lookup)) return membership::from_environment(lookup);
  membership::Membership alone;
  alone.local_size = 1;
  alone.host = lookup("WEFT_HOST").value_or("localhost");
  alone.interface = lookup("WEFT_INTERFACE").value_or("");
  alone.secret = membership::new_secret();
  return alone;
}

// A switch of the environment: 0 or 1.
Result<bool> find_switch(const membership::Lookup& lookup, const char* name, bool otherwise) {
  auto value = lookup(name);
  if (!value) return otherwise;
  if (*value == "0" || *value == "1") return *value == "1";
  return error(Code::invalid_argument, "%s is \"%s\": expected 0 or 1", name,
               shown(*value).c_str());
}

// What the options give, what the environment says, or `otherwise`.
Result<Nanos> find_timeout(const std::optional<Nanos>& given, const membership::Lookup& lookup,
                           const char* name, Nanos otherwise) {
  const auto value = lookup(name);
  Nanos timeout = given.value_or(otherwise);
  bool right = true;
  if (!given && value) {
    const auto parsed = parse_duration(*value);
    right = parsed.ok();
    if (right) timeout = *parsed;
  }
  if (right && timeout.count > 0 && timeout <= kTimeoutMax) return timeout;
  const std::string found = given ? format_duration(*given) : shown(value.value_or(""));
  return error(Code::invalid_argument,
               "%s is \"%s\": expected a time to wait, above 0 and at most 30 days, such as 30s",
               given ? "a timeout" : name, found.c_str());
}

Result<plan::Plan> find_plan(const membership::Lookup& lookup) {
  auto named = lookup("WEFT_PLAN");
  auto plan = plan::load(named.value_or("default"));
  if (!plan && named) return std::move(plan).error().in("WEFT_PLAN");
  return plan;
}

// What `weft bench algorithms -o FILE` wrote.
Result<std::optional<cost::Costs>> find_costs(const membership::Lookup& lookup) {
  const auto path = lookup("WEFT_COSTS");
  if (!path || path->empty()) return std::optional<cost::Costs>();
  auto text = read_file(*path, kib(64));
  if (!text) return std::move(text).error().in("WEFT_COSTS");
  auto costs = cost::from_json(*text);
  if (!costs) return std::move(costs).error().in(*path).in("WEFT_COSTS");
  return std::optional(std::move(*costs));
}

Result<runtime::Options> find_options(const JoinOptions& given, const membership::Lookup& lookup,
                                      const membership::Membership& membership) {
  runtime::Options options;
  options.rank = {membership.rank};
  options.ranks = membership.size;
  options.rendezvous = membership.rendezvous;
  options.listening = given.listening;
  options.interface = given.interface.value_or(membership.interface);
  options.secret = membership.secret;
  options.host = membership.host;
  if (given.plan) {
    options.plan = *given.plan;
  } else {
    WEFT_ASSIGN(options.plan, find_plan(lookup));
    options.plan_was_named = lookup("WEFT_PLAN").has_value();
  }
  if (given.shared_memory) {
    options.shared_memory = *given.shared_memory;
  } else {
    WEFT_ASSIGN(options.shared_memory, find_switch(lookup, "WEFT_SHARED_MEMORY", true));
  }
  if (given.sealed) {
    options.sealed = *given.sealed;
  } else {
    WEFT_ASSIGN(options.sealed, find_switch(lookup, "WEFT_SEAL", false));
  }
  WEFT_ASSIGN(options.costs, find_costs(lookup));
  WEFT_ASSIGN(options.join_deadline,
              find_timeout(given.join_timeout, lookup, "WEFT_JOIN_TIMEOUT", options.join_deadline));
  WEFT_ASSIGN(options.progress_deadline,
              find_timeout(given.progress_timeout, lookup, "WEFT_PROGRESS_TIMEOUT",
                           options.progress_deadline));
  WEFT_ASSIGN(options.ready_deadline, find_timeout(given.ready_timeout, lookup,
                                                   "WEFT_READY_TIMEOUT", options.ready_deadline));
  return options;
}

// Where `weft lab run` put this rank: facts by name, for those who read the trace.
Result<std::map<std::string, std::string>> find_lab(const membership::Lookup& lookup) {
  constexpr JsonLimits kLimits{.depth = 1, .values = 1000};
  std::map<std::string, std::string> facts;
  const auto words = lookup("WEFT_LAB");
  if (!words || words->empty()) return facts;
  nlohmann::json json;  // of no kind
  if (check_json(*words, kLimits)) json = nlohmann::json::parse(*words, nullptr, false);
  bool right = json.is_object();
  for (const auto& [name, value] : json.items()) {
    right = right && value.is_string();
    if (right) facts[name] = value.get<std::string>();
  }
  if (right) return facts;
  return error(Code::invalid_argument,
               "WEFT_LAB is \"%s\": expected a JSON object of texts, as `weft lab run` sets it",
               shown(*words).c_str());
}

// One file a rank, as every run of weft has.
Result<std::unique_ptr<capture::Recorder>> start_recorder(const std::string& folder,
                                                          const runtime::Options& joining,
                                                          const membership::Lookup& lookup) {
  if (folder.empty()) return capture::Recorder::off();
  std::error_code failure;
  std::filesystem::create_directories(folder, failure);
  if (failure) return io_error(failure.value(), "cannot make %s for the trace", folder.c_str());
  capture::Options options;
  options.path = folder + "/" + trace::file_name(joining.rank.index);
  options.environment = runtime::describe_rank(joining);
  WEFT_ASSIGN(options.environment.lab, find_lab(lookup));
  return capture::Recorder::start(std::move(options));
}

// `said`: what the program has told of its model.
Result<trace::Model> describe(const std::vector<Tensor>& tensors, trace::Model said) {
  uint32_t layers = 0;
  for (const Tensor& tensor : tensors) {
    if (tensor.layer >= kLayersMax)
      return error(Code::invalid_argument, "tensor \"%s\" is of layer %u; there may be %u layers",
                   tensor.name.c_str(), tensor.layer, kLayersMax);
    layers = std::max(layers, tensor.layer + 1);
  }
  trace::Model model = std::move(said);
  if (!model.layers.empty() && layers > model.layers.size())
    return error(Code::invalid_argument, "tensors are of %u layers, and the model has %zu", layers,
                 model.layers.size());
  for (auto layer = static_cast<uint32_t>(model.layers.size()); layer < layers; ++layer)
    model.layers.push_back({text("layer %u", layer)});
  if (!model.tensors.empty()) {
    bool same = model.tensors.size() == tensors.size();
    for (size_t t = 0; same && t < tensors.size(); ++t)
      same = model.tensors[t].name == tensors[t].name &&
             model.tensors[t].bytes == tensors[t].data.size_bytes();
    if (!same)
      return error(Code::invalid_argument,
                   "the exchange has other tensors than the model that was said to marks() (%zu "
                   "and %zu): let the model name layers only, or the same tensors in this order",
                   tensors.size(), model.tensors.size());
    return model;
  }
  for (const Tensor& tensor : tensors)
    model.tensors.push_back(
        {tensor.name, tensor.data.size_bytes(), tensor.layer, tensor.layer, tensor.layer});
  return model;
}

// "float32, bfloat16" where tensors have several types; otherwise empty.
std::string types_of(const std::vector<Tensor>& tensors) {
  std::vector<Type> types;
  for (const Tensor& tensor : tensors)
    if (std::find(types.begin(), types.end(), tensor.type) == types.end())
      types.push_back(tensor.type);
  std::string out;
  for (Type type : types) out += (out.empty() ? "" : ", ") + std::string(reduce::name_of(type));
  return types.size() > 1 ? out : "";
}

}  // namespace

Job::Job(std::shared_ptr<capture::Recorder> recorder, std::shared_ptr<mark::Marks> marks,
         std::unique_ptr<Group> group, membership::Membership membership, plan::Plan plan)
    : recorder_(std::move(recorder)),
      marks_(std::move(marks)),
      group_(std::move(group)),
      membership_(std::move(membership)),
      plan_(std::move(plan)) {}

Job::~Job() = default;

Result<std::unique_ptr<Exchange>> Job::exchange(std::vector<Tensor> tensors) {
  WEFT_ASSIGN(const trace::Model model, describe(tensors, marks_->model()));
  const std::string types = types_of(tensors);
  WEFT_ASSIGN(auto exchange, group_->exchange(std::move(tensors)));
  WEFT_TRY(marks_->model(model));
  if (!types.empty()) recorder_->note(kTensorTypes, types);
  return exchange;
}

Result<std::unique_ptr<Job>> Job::rebuild(Nanos settle, uint32_t least) {
  WEFT_ASSIGN(auto group, group_->rebuild(settle, least));
  membership::Membership membership = membership_;
  membership.rank = group->rank().index;
  membership.size = group->ranks();
  // Who of this host is left, the launcher did not say.
  membership.local_rank = 0;
  membership.local_size = 0;
  return std::unique_ptr<Job>(
      new Job(recorder_, marks_, std::move(group), std::move(membership), plan_));
}

Result<void> Job::leave() {
  WEFT_TRY(group_->leave());
  marks_->tell_refused();
  return recorder_->flush();
}

Result<std::unique_ptr<Job>> join(const JoinOptions& given) {
  const membership::Lookup lookup = given.environment ? given.environment : variable_of_process;
  membership::Membership membership;
  if (given.membership) {
    membership = *given.membership;
    WEFT_TRY(membership::check_secret(membership.secret, "the given secret"));
  } else {
    WEFT_ASSIGN(membership, find_membership(lookup));
  }
  WEFT_ASSIGN(runtime::Options options, find_options(given, lookup, membership));
  const std::string folder =
      given.trace ? *given.trace : lookup("WEFT_TRACE").value_or(std::string());
  options.probe = given.probe.value_or(!folder.empty());
  WEFT_ASSIGN(std::shared_ptr<capture::Recorder> recorder, start_recorder(folder, options, lookup));
  WEFT_ASSIGN(auto group, Group::join(options, *recorder));
  auto marks = std::make_shared<mark::Marks>(recorder);
  return std::unique_ptr<Job>(new Job(std::move(recorder), std::move(marks), std::move(group),
                                      std::move(membership), options.plan));
}

}  // namespace weft::api
