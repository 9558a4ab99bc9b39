#include "weft/plan.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "internal.h"

namespace weft::plan {

namespace {

using Json = nlohmann::ordered_json;

template <typename T, size_t N>
const char* word_of(T value, const std::array<Word<T>, N>& words) {
  for (const Word<T>& word : words)
    if (word.value == value) return word.name;
  return "unknown";
}

}  // namespace

const char* name_of(Order order) { return word_of(order, kOrders); }
const char* name_of(Barrier barrier) { return word_of(barrier, kBarriers); }
const char* name_of(LaneWorker worker) { return word_of(worker, kLaneWorkers); }
const char* name_of(Sync sync) { return word_of(sync, kSyncs); }

const std::vector<std::string>& algorithm_names() {
  static const std::vector<std::string> names = {
      "ring", "halving_doubling", "tree", "hierarchical", "doubling", "direct", "auto"};
  return names;
}

const std::vector<std::string>& codec_names() {
  static const std::vector<std::string> names = {"none",     "fp16",  "bf16", "one_bit",  "qsgd",
                                                 "terngrad", "top_k", "dgc",  "power_sgd"};
  return names;
}

// ---- how errors are said -----------------------------------------------------------------

std::string in_quotes(std::string_view input) { return "\"" + printable(input) + "\""; }

std::string pointer_step(std::string_view key) {
  std::string step = "/";
  for (char c : key) {
    if (c == '~') {
      step += "~0";
    } else if (c == '/') {
      step += "~1";
    } else {
      step += c;
    }
  }
  return printable(step, 200);
}

Error mismatch(const std::string& path, const std::string& found, const std::string& expected) {
  return error(Code::invalid_argument, "%s: found %s, expected %s", path.c_str(), found.c_str(),
               expected.c_str());
}

std::string integer_range(int64_t low, int64_t high) {
  return text("an integer from %lld to %lld", static_cast<long long>(low),
              static_cast<long long>(high));
}

std::string size_range(Bytes low, Bytes high) {
  return "a size from " + format_bytes(low) + " to " + format_bytes(high);
}

std::string name_fault(std::string_view name, size_t limit) {
  if (name.empty()) return "is empty";
  if (name.size() > limit) return text("is longer than %zu bytes", limit);
  for (size_t i = 0; i < name.size();) {
    const Character character = first_character(name.substr(i));
    if (character.length == 0) return "is not UTF-8";
    if (is_control(character.point)) return "holds a control character";
    i += character.length;
  }
  return "";
}

std::string one_of(std::string_view found, const std::vector<std::string>& words) {
  std::string out = words.size() == 2 ? words[0] + " or " + words[1] : "one of ";
  if (words.size() != 2)
    for (size_t i = 0; i < words.size(); ++i) out += (i == 0 ? "" : ", ") + words[i];
  if (auto near = nearest(found, words)) out += "; did you mean \"" + *near + "\"?";
  return out;
}

// ---- validate ----------------------------------------------------------------------------

namespace {

Result<void> check_integer(const std::string& path, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return {};
  return mismatch(path, std::to_string(value), integer_range(low, high));
}

Result<void> check_size(const std::string& path, Bytes value, Bytes low, Bytes high) {
  if (value >= low && value <= high) return {};
  return mismatch(path, format_bytes(value), size_range(low, high));
}

Result<void> check_word(const std::string& path, const std::string& word,
                        const std::vector<std::string>& words) {
  if (std::find(words.begin(), words.end(), word) != words.end()) return {};
  return mismatch(path, in_quotes(word), one_of(word, words));
}

Result<void> check_name(const std::string& path, std::string_view name, size_t limit) {
  const std::string fault = name_fault(name, limit);
  if (fault.empty()) return {};
  return error(Code::invalid_argument, "%s: the name %s %s", path.c_str(), in_quotes(name).c_str(),
               fault.c_str());
}

Result<void> check_comment(const std::string& comment) {
  if (comment.size() > kCommentMax)
    return error(Code::invalid_argument, "/comment: is longer than %zu bytes", kCommentMax);
  for (size_t i = 0; i < comment.size();) {
    const size_t length = first_character(std::string_view(comment).substr(i)).length;
    if (length == 0) return error(Code::invalid_argument, "/comment: is not UTF-8");
    i += length;
  }
  return {};
}

Result<void> check_buckets(const std::vector<BucketSpec>& buckets) {
  std::unordered_map<std::string_view, size_t> seen;
  for (size_t i = 0; i < buckets.size(); ++i) {
    const std::string path = text("/buckets/%zu", i);
    const BucketSpec& bucket = buckets[i];
    if (bucket.tensors.empty())
      return mismatch(path + "/tensors", "an empty array", "at least one tensor name");
    for (size_t j = 0; j < bucket.tensors.size(); ++j) {
      const std::string& tensor = bucket.tensors[j];
      const auto where = [&] { return path + text("/tensors/%zu", j); };
      if (!name_fault(tensor, kTensorNameMax).empty())
        return check_name(where(), tensor, kTensorNameMax);
      const auto [first, inserted] = seen.emplace(tensor, i);
      if (!inserted)
        return error(Code::invalid_argument,
                     "%s: %s is already in /buckets/%zu; expected each tensor in one bucket",
                     where().c_str(), in_quotes(tensor).c_str(), first->second);
    }
    if (bucket.priority)
      WEFT_TRY(check_integer(path + "/priority", *bucket.priority, -kPriorityMax, kPriorityMax));
    if (bucket.codec) WEFT_TRY(check_word(path + "/codec", *bucket.codec, codec_names()));
  }
  return {};
}

Result<void> check_algorithm(const std::vector<AlgorithmRule>& rules) {
  if (rules.empty()) return mismatch("/algorithm", "an empty array", "at least one rule");
  for (size_t i = 0; i < rules.size(); ++i) {
    const std::string path = text("/algorithm/%zu", i);
    const AlgorithmRule& rule = rules[i];
    WEFT_TRY(check_word(path + "/use", rule.use, algorithm_names()));
    const bool last = i + 1 == rules.size();
    if (!rule.up_to && !last)
      return error(Code::invalid_argument,
                   "%s: has no \"up_to\", so no later rule can apply; expected that of the last "
                   "rule only",
                   path.c_str());
    if (rule.up_to && last)
      return error(Code::invalid_argument,
                   "%s: has an \"up_to\", so larger sizes have no algorithm; expected none in the "
                   "last rule",
                   path.c_str());
    if (!rule.up_to) continue;
    WEFT_TRY(check_size(path + "/up_to", *rule.up_to, {1}, kSizeMax));
    if (i > 0 && *rule.up_to <= *rules[i - 1].up_to)
      return mismatch(
          path + "/up_to", format_bytes(*rule.up_to),
          "more than the " + format_bytes(*rules[i - 1].up_to) + " of the rule before it");
  }
  return {};
}

Result<void> check_sync(Sync sync, uint32_t staleness) {
  const std::string path = "/sync/staleness";
  WEFT_TRY(check_integer(path, staleness, 0, kStalenessMax));
  const bool counts = sync == Sync::bounded_stale || sync == Sync::local_sgd;
  // A number that means nothing would give two hashes to plans that do the same.
  if (!counts && staleness != 0)
    return mismatch(path, std::to_string(staleness),
                    text("0, because the mode is %s", name_of(sync)));
  if (sync == Sync::local_sgd && staleness == 0)
    return mismatch(path, "0", integer_range(1, kStalenessMax) + " local steps for local_sgd");
  return {};
}

}  // namespace

Result<void> validate(const Plan& plan) {
  WEFT_TRY(check_name("/name", plan.name, kNameMax));
  WEFT_TRY(check_comment(plan.comment));
  WEFT_TRY(check_size("/bucket_rule/first", plan.bucket_rule.first, {1}, kSizeMax));
  WEFT_TRY(check_size("/bucket_rule/size", plan.bucket_rule.size, {1}, kSizeMax));
  WEFT_TRY(check_buckets(plan.buckets));
  if (plan.partition) WEFT_TRY(check_size("/partition", *plan.partition, kPartitionMin, kSizeMax));
  for (const auto& [tensor, priority] : plan.priority) {
    if (!name_fault(tensor, kTensorNameMax).empty())
      return check_name("/priority" + pointer_step(tensor), tensor, kTensorNameMax);
    if (priority < -kPriorityMax || priority > kPriorityMax)
      return check_integer("/priority" + pointer_step(tensor), priority, -kPriorityMax,
                           kPriorityMax);
  }
  if (plan.credit) WEFT_TRY(check_size("/credit", *plan.credit, {1}, kSizeMax));
  WEFT_TRY(check_algorithm(plan.algorithm));
  WEFT_TRY(check_integer("/lanes", plan.lanes, 1, kLanesMax));
  WEFT_TRY(check_size("/chunk", plan.chunk, kChunkMin, kChunkMax));
  if (plan.lane_workers < 1 || plan.lane_workers > plan.lanes)
    return mismatch("/lane_workers", std::to_string(plan.lane_workers),
                    integer_range(1, plan.lanes) + ", the number of lanes");
  WEFT_TRY(check_word("/codec", plan.codec, codec_names()));
  return check_sync(plan.sync, plan.staleness);
}

// ---- text --------------------------------------------------------------------------------

namespace {

// Writes the text as it goes. No tree is made of it: a rank hashes its plan when it joins, and
// taking a tree of nlohmann's apart needs memory, for want of which the process would end.
class Writer {
 public:
  void open(char bracket) {
    begin_value();
    out_ += bracket;
    ++depth_;
    first_ = true;
  }
  void close(char bracket) {
    --depth_;
    if (!first_) new_line();
    out_ += bracket;
    first_ = false;
  }
  Writer& key(std::string_view name) {
    begin_value();
    quote(name);
    out_ += ": ";
    after_key_ = true;
    return *this;
  }
  void string(std::string_view value) {
    begin_value();
    quote(value);
  }
  void number(int64_t value) { literal(std::to_string(value)); }
  void boolean(bool value) { literal(value ? "true" : "false"); }
  void size_or_null(const std::optional<Bytes>& size) {
    if (size)
      string(format_bytes(*size));
    else
      literal("null");
  }
  std::string finish() && { return std::move(out_) + "\n"; }

 private:
  void literal(std::string_view words) {
    begin_value();
    out_ += words;
  }
  void begin_value() {
    if (std::exchange(after_key_, false)) return;
    if (depth_ > 0 && !std::exchange(first_, false)) out_ += ',';
    if (depth_ > 0) new_line();
  }
  void new_line() {
    out_ += '\n';
    out_.append(2 * depth_, ' ');
  }
  // Text that a Plan made by hand may hold is not UTF-8: what is no character is replaced.
  void quote(std::string_view raw) {
    static constexpr std::string_view kShort = "\b\t\n\f\r\"\\", kLetters = "btnfr\"\\";
    out_ += '"';
    while (!raw.empty()) {
      const size_t length = first_character(raw).length;
      const size_t short_form = kShort.find(raw.front());
      if (length == 0)
        out_ += kReplacementCharacter;
      else if (short_form != std::string_view::npos)
        (out_ += '\\') += kLetters[short_form];
      else if (length == 1 && static_cast<unsigned char>(raw.front()) < 0x20)
        out_ += text("\\u%04x", static_cast<unsigned>(raw.front()));
      else
        out_ += raw.substr(0, length);
      raw.remove_prefix(std::max<size_t>(length, 1));
    }
    out_ += '"';
  }

  std::string out_;
  size_t depth_ = 0;
  bool first_ = true;
  bool after_key_ = false;
};

// `named`: with name and comment, which say nothing about what the plan does.
std::string document(const Plan& plan, bool named) {
  Writer out;
  out.open('{');
  out.key("weft_plan").number(kFormatVersion);
  if (named) {
    out.key("name").string(plan.name);
    out.key("comment").string(plan.comment);
  }
  out.key("bucket_rule").open('{');
  out.key("first").string(format_bytes(plan.bucket_rule.first));
  out.key("size").string(format_bytes(plan.bucket_rule.size));
  out.key("may_exceed").boolean(plan.bucket_rule.may_exceed);
  out.close('}');
  out.key("buckets").open('[');
  for (const BucketSpec& bucket : plan.buckets) {
    out.open('{');
    out.key("tensors").open('[');
    for (const std::string& tensor : bucket.tensors) out.string(tensor);
    out.close(']');
    if (bucket.priority) out.key("priority").number(*bucket.priority);
    if (bucket.codec) out.key("codec").string(*bucket.codec);
    out.close('}');
  }
  out.close(']');
  out.key("partition").size_or_null(plan.partition);
  out.key("order").string(name_of(plan.order));
  out.key("priority").open('{');
  for (const auto& [tensor, value] : plan.priority) out.key(tensor).number(value);
  out.close('}');
  out.key("credit").size_or_null(plan.credit);
  out.key("barrier").string(name_of(plan.barrier));
  out.key("algorithm").open('[');
  for (const AlgorithmRule& rule : plan.algorithm) {
    out.open('{');
    if (rule.up_to) out.key("up_to").string(format_bytes(*rule.up_to));
    out.key("use").string(rule.use);
    out.close('}');
  }
  out.close(']');
  out.key("lanes").number(plan.lanes);
  out.key("chunk").string(format_bytes(plan.chunk));
  out.key("lane_worker").string(name_of(plan.lane_worker));
  out.key("lane_workers").number(plan.lane_workers);
  out.key("codec").string(plan.codec);
  out.key("sync").open('{');
  out.key("mode").string(name_of(plan.sync));
  out.key("staleness").number(plan.staleness);
  out.close('}');
  out.close('}');
  return std::move(out).finish();
}

}  // namespace

std::string canonical(const Plan& plan) { return document(plan, true); }

std::string hash(const Plan& plan) {
  return text("%016llx", static_cast<unsigned long long>(hash64(document(plan, false))));
}

// ---- diff --------------------------------------------------------------------------------

namespace {

std::string shown(const Json* value) {
  if (value == nullptr) return "absent";
  return value->is_string() ? value->get<std::string>() : value->dump();
}

bool is_list_of_names(const Json& value) {
  return value.is_array() && !value.empty() && value[0].is_string();
}

void compare(const std::string& path, const Json* before, const Json* after,
             std::vector<Difference>& out) {
  if (before != nullptr && after != nullptr) {
    if (*before == *after) return;
    if (before->is_object() && after->is_object()) {
      // Both sides by key once, because a lookup in ordered_json is linear.
      std::unordered_map<std::string_view, const Json*> others;
      for (const auto& [key, value] : after->items()) others.emplace(key, &value);
      for (const auto& [key, value] : before->items()) {
        const auto other = others.find(key);
        compare(path + pointer_step(key), &value, other == others.end() ? nullptr : other->second,
                out);
        if (other != others.end()) others.erase(other);
      }
      for (const auto& [key, value] : after->items())
        if (others.contains(key)) compare(path + pointer_step(key), nullptr, &value, out);
      return;
    }
    if (before->is_array() && after->is_array() && !is_list_of_names(*before) &&
        !is_list_of_names(*after)) {
      for (size_t i = 0; i < std::max(before->size(), after->size()); ++i)
        compare(path + text("/%zu", i), i < before->size() ? &(*before)[i] : nullptr,
                i < after->size() ? &(*after)[i] : nullptr, out);
      return;
    }
  }
  out.push_back({path, shown(before), shown(after)});
}

}  // namespace

std::vector<Difference> diff(const Plan& before, const Plan& after) {
  const Json left = Json::parse(document(before, true));
  const Json right = Json::parse(document(after, true));
  std::vector<Difference> out;
  compare("", &left, &right, out);
  return out;
}

// ---- load --------------------------------------------------------------------------------

Result<Plan> load(const std::string& path_or_preset) {
  const std::vector<std::string> presets = preset_names();
  if (std::find(presets.begin(), presets.end(), path_or_preset) != presets.end())
    return preset(path_or_preset);
  auto content = read_file(path_or_preset, kDocumentMax);
  if (!content) {
    if (content.error().code() != Code::not_found) return std::move(content).error();
    return error(Code::not_found, "%s is neither a file nor a preset: expected a path, or %s",
                 printable(path_or_preset, 1000).c_str(), one_of(path_or_preset, presets).c_str());
  }
  auto plan = parse(*content);
  if (!plan) return std::move(plan).error().in(path_or_preset);
  return plan;
}

}  // namespace weft::plan
