// Text -> Plan, in two steps: the text, which is neither deep nor vast, becomes a tree that holds
// no key twice, then the tree is read field by field. A field that is not in a list below is
// refused.

#include <algorithm>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <nlohmann/json.hpp>

#include "internal.h"
#include "weft/plan.h"

namespace weft::plan {

namespace {

// Sorted keys: finding a key twice must not take quadratic time in a document of a million keys.
using Json = nlohmann::json;

constexpr JsonLimits kLimits = {.depth = 8, .values = 1u << 22};  // a plan needs four levels

// ---- text -> tree ------------------------------------------------------------------------

class Builder final : public nlohmann::json_sax<Json> {
 public:
  explicit Builder(std::string_view input) : input_(input) {}

  Json& tree() { return tree_; }
  const std::optional<Error>& error() const { return error_; }

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t&) override { return add(value); }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t&) override { return refuse("binary values are not JSON"); }

  bool start_object(std::size_t) override { return open(Json::object()); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    if (open_.back().container->contains(name)) {
      open_.back().key = name;
      return refuse("the key is given twice");
    }
    open_.back().key = std::move(name);
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& failure) override {
    // "[json.exception.parse_error.101] parse error at line 1, column 5: syntax error ..."
    std::string_view what = failure.what();
    if (const size_t end = what.find("] "); end != what.npos) what.remove_prefix(end + 2);
    if (what.substr(0, 11) == "parse error")
      if (const size_t end = what.find(": "); end != what.npos) what.remove_prefix(end + 2);
    const size_t at = std::min(position == 0 ? 0 : position - 1, input_.size());
    const std::string_view before = input_.substr(0, at);
    const auto line = 1 + std::count(before.begin(), before.end(), '\n');
    const size_t line_start = before.rfind('\n') + 1;  // npos + 1 is 0: the first line
    error_ = weft::error(Code::invalid_argument, "line %lld, column %zu: %s",
                         static_cast<long long>(line), at - line_start + 1,
                         printable(what, 200).c_str());
    return false;
  }

 private:
  struct Open {
    Json* container;
    std::string key;  // of the value that comes next, in an object
  };

  // Where the value that comes next would stand.
  std::string path() const {
    std::string out;
    for (const Open& level : open_) {
      // An array that holds another open one already counts it.
      const size_t next = level.container->size() - (&level == &open_.back() ? 0 : 1);
      out += level.container->is_array() ? "/" + std::to_string(next) : pointer_step(level.key);
    }
    return out.empty() ? "document" : out;
  }

  bool refuse(const char* what) {
    error_ = weft::error(Code::invalid_argument, "%s: %s", path().c_str(), what);
    return false;
  }

  bool add(Json value) {
    put(std::move(value));
    return true;
  }

  // The new value where it stands in the tree.
  Json& put(Json value) {
    if (open_.empty()) return tree_ = std::move(value);
    Json& container = *open_.back().container;
    if (container.is_object()) return container[open_.back().key] = std::move(value);
    container.push_back(std::move(value));
    return container.back();
  }

  bool open(Json container) {
    // The pointer holds while it is open: its container grows only after it is closed.
    open_.push_back({&put(std::move(container)), {}});
    return true;
  }

  bool close() {
    open_.pop_back();
    return true;
  }

  std::string_view input_;
  Json tree_;
  std::vector<Open> open_;
  std::optional<Error> error_;
};

// ---- tree -> values ----------------------------------------------------------------------

// A value and where it stands. The path is made only for an error: a plan may name many tensors.
struct Node {
  const Json& value;
  const Node* up = nullptr;
  std::string_view key = {};  // in an object
  size_t index = 0;           // in an array

  std::string path() const {
    if (up == nullptr) return "";
    return up->path() + (up->value.is_array() ? "/" + std::to_string(index) : pointer_step(key));
  }
  Error expected(const std::string& what) const {
    const std::string where = up == nullptr ? "document" : path();
    return mismatch(where, found(), what);
  }
  std::string found() const {
    if (value.is_object()) return "an object";
    if (value.is_array()) return "an array";
    if (value.is_string()) return in_quotes(value.get_ref<const std::string&>());
    return value.dump();
  }
};

struct Field {
  const char* key;
  std::function<Result<void>(const Node&)> read;
};

Result<void> read_object(const Node& node, std::initializer_list<Field> fields) {
  if (!node.value.is_object()) return node.expected("an object");
  for (const auto& [key, value] : node.value.items()) {
    const Node child{value, &node, key};
    const auto field = std::find_if(fields.begin(), fields.end(),
                                    [&key = key](const Field& f) { return key == f.key; });
    if (field != fields.end()) {
      WEFT_TRY(field->read(child));
      continue;
    }
    std::vector<std::string> known;
    for (const Field& f : fields) known.emplace_back(f.key);
    const auto near = nearest(key, known);
    return error(Code::invalid_argument, "%s: unknown key%s", child.path().c_str(),
                 near ? ("; did you mean \"" + *near + "\"?").c_str() : "");
  }
  return {};
}

Result<void> require(const Node& node, const char* key) {
  if (node.value.contains(key)) return {};
  return error(Code::invalid_argument, "%s: the key \"%s\" is missing", node.path().c_str(), key);
}

Result<void> read_array(const Node& node, const char* of,
                        const std::function<Result<void>(const Node&)>& read) {
  if (!node.value.is_array()) return node.expected(text("an array of %s", of));
  for (size_t i = 0; i < node.value.size(); ++i) WEFT_TRY(read(Node{node.value[i], &node, {}, i}));
  return {};
}

// The integer that a number stands for. JSON has one kind of number, so 4.0 and 4 are the same.
std::optional<int64_t> integer_in(const Json& value) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
    return static_cast<int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (!value.is_number_float()) return std::nullopt;
  const auto number = value.get<double>();
  if (number != std::floor(number) || std::abs(number) > 0x1p53) return std::nullopt;
  return static_cast<int64_t>(number);
}

template <typename T>
Result<void> read_integer(const Node& node, int64_t low, int64_t high, T& out) {
  const auto value = integer_in(node.value);
  if (!value || *value < low || *value > high) return node.expected(integer_range(low, high));
  out = static_cast<T>(*value);
  return {};
}

// Sizes as text are digits with a unit and nothing else, so that the schema can say the same.
Result<Bytes> size_in(const Node& node, Bytes low, Bytes high) {
  if (node.value.is_string()) {
    const auto& written = node.value.get_ref<const std::string&>();
    const bool plain = !written.empty() && written[0] >= '0' && written[0] <= '9' &&
                       written.find(' ') == written.npos;
    const auto size = plain ? parse_bytes(written) : Result<Bytes>(Bytes{UINT64_MAX});
    if (size && *size >= low && *size <= high) return *size;
  } else if (const auto count = integer_in(node.value); count && *count >= 0) {
    const Bytes size{static_cast<uint64_t>(*count)};
    if (size >= low && size <= high) return size;
  }
  return node.expected(size_range(low, high));
}

Result<void> read_size(const Node& node, Bytes low, Bytes high, Bytes& out) {
  WEFT_ASSIGN(out, size_in(node, low, high));
  return {};
}

Result<void> read_size_or_null(const Node& node, Bytes low, Bytes high, std::optional<Bytes>& out) {
  out.reset();
  if (node.value.is_null()) return {};
  auto size = size_in(node, low, high);
  if (!size) return node.expected(size_range(low, high) + ", or null");
  out = *size;
  return {};
}

Result<void> read_bool(const Node& node, bool& out) {
  if (!node.value.is_boolean()) return node.expected("true or false");
  out = node.value.get<bool>();
  return {};
}

Result<void> read_text(const Node& node, std::string& out) {
  if (!node.value.is_string()) return node.expected("text");
  out = node.value.get<std::string>();
  return {};
}

Result<void> read_name(const Node& node, size_t limit, std::string& out) {
  if (!node.value.is_string()) return node.expected("a name");
  out = node.value.get<std::string>();
  const std::string fault = name_fault(out, limit);
  if (fault.empty()) return {};
  return error(Code::invalid_argument, "%s: the name %s %s", node.path().c_str(),
               in_quotes(out).c_str(), fault.c_str());
}

Result<void> read_word(const Node& node, const std::vector<std::string>& words, std::string& out) {
  if (!node.value.is_string()) return node.expected(one_of("", words));
  out = node.value.get<std::string>();
  if (std::find(words.begin(), words.end(), out) == words.end())
    return node.expected(one_of(out, words));
  return {};
}

template <typename T, size_t N>
Result<void> read_enum(const Node& node, const std::array<Word<T>, N>& words, T& out) {
  std::vector<std::string> names;
  names.reserve(N);
  for (const Word<T>& word : words) names.emplace_back(word.name);
  std::string name;
  WEFT_TRY(read_word(node, names, name));
  for (const Word<T>& word : words)
    if (name == word.name) out = word.value;
  return {};
}

// ---- the document ------------------------------------------------------------------------

Result<void> read_version(const Node& document) {
  if (!document.value.is_object()) return document.expected("an object");
  const auto found = document.value.find("weft_plan");
  if (found == document.value.end())
    return error(Code::invalid_argument, "/weft_plan: missing, expected %d, the format's version",
                 kFormatVersion);
  const Node node{*found, &document, "weft_plan"};
  const auto version = integer_in(*found);
  if (version && *version > kFormatVersion)
    return error(Code::unsupported,
                 "/weft_plan: the plan is of format version %lld, and weft %s reads up to %d",
                 static_cast<long long>(*version), weft::version(), kFormatVersion);
  if (!version || *version != kFormatVersion)
    return node.expected(text("%d, the format's version", kFormatVersion));
  return {};
}

Result<void> read_bucket_rule(const Node& node, BucketRule& out) {
  return read_object(
      node, {{"first", [&](const Node& n) { return read_size(n, {1}, kSizeMax, out.first); }},
             {"size", [&](const Node& n) { return read_size(n, {1}, kSizeMax, out.size); }},
             {"may_exceed", [&](const Node& n) { return read_bool(n, out.may_exceed); }}});
}

Result<void> read_bucket(const Node& node, BucketSpec& out) {
  const auto read_tensor = [&](const Node& n) {
    return read_name(n, kTensorNameMax, out.tensors.emplace_back());
  };
  WEFT_TRY(read_object(
      node, {{"tensors", [&](const Node& n) { return read_array(n, "tensor names", read_tensor); }},
             {"priority",
              [&](const Node& n) {
                return read_integer(n, -kPriorityMax, kPriorityMax, out.priority.emplace());
              }},
             {"codec",
              [&](const Node& n) { return read_word(n, codec_names(), out.codec.emplace()); }}}));
  return require(node, "tensors");
}

Result<void> read_priority(const Node& node, std::map<std::string, int64_t>& out) {
  if (!node.value.is_object()) return node.expected("an object of tensor names and integers");
  for (const auto& [tensor, value] : node.value.items()) {
    const Node child{value, &node, tensor};
    int64_t priority = 0;
    WEFT_TRY(read_integer(child, -kPriorityMax, kPriorityMax, priority));
    out.emplace_hint(out.end(), tensor, priority);
  }
  return {};
}

Result<void> read_rule(const Node& node, AlgorithmRule& out) {
  WEFT_TRY(read_object(
      node,
      {{"up_to", [&](const Node& n) { return read_size(n, {1}, kSizeMax, out.up_to.emplace()); }},
       {"use", [&](const Node& n) { return read_word(n, algorithm_names(), out.use); }}}));
  return require(node, "use");
}

Result<void> read_sync(const Node& node, Plan& out) {
  return read_object(node, {{"mode", [&](const Node& n) { return read_enum(n, kSyncs, out.sync); }},
                            {"staleness", [&](const Node& n) {
                               return read_integer(n, 0, kStalenessMax, out.staleness);
                             }}});
}

Result<void> read_document(const Node& node, Plan& out) {
  const auto read_buckets = [&](const Node& n) {
    return read_array(n, "buckets",
                      [&](const Node& e) { return read_bucket(e, out.buckets.emplace_back()); });
  };
  const auto read_rules = [&](const Node& n) {
    out.algorithm.clear();
    return read_array(n, "rules",
                      [&](const Node& e) { return read_rule(e, out.algorithm.emplace_back()); });
  };
  return read_object(
      node,
      {{"weft_plan", [](const Node&) { return Result<void>(); }},
       {"name", [&](const Node& n) { return read_name(n, kNameMax, out.name); }},
       {"comment", [&](const Node& n) { return read_text(n, out.comment); }},
       {"bucket_rule", [&](const Node& n) { return read_bucket_rule(n, out.bucket_rule); }},
       {"buckets", read_buckets},
       {"partition",
        [&](const Node& n) {
          return read_size_or_null(n, kPartitionMin, kSizeMax, out.partition);
        }},
       {"order", [&](const Node& n) { return read_enum(n, kOrders, out.order); }},
       {"priority", [&](const Node& n) { return read_priority(n, out.priority); }},
       {"credit", [&](const Node& n) { return read_size_or_null(n, {1}, kSizeMax, out.credit); }},
       {"barrier", [&](const Node& n) { return read_enum(n, kBarriers, out.barrier); }},
       {"algorithm", read_rules},
       {"lanes", [&](const Node& n) { return read_integer(n, 1, kLanesMax, out.lanes); }},
       {"chunk", [&](const Node& n) { return read_size(n, kChunkMin, kChunkMax, out.chunk); }},
       {"lane_worker", [&](const Node& n) { return read_enum(n, kLaneWorkers, out.lane_worker); }},
       {"lane_workers",
        [&](const Node& n) { return read_integer(n, 1, kLanesMax, out.lane_workers); }},
       {"codec", [&](const Node& n) { return read_word(n, codec_names(), out.codec); }},
       {"sync", [&](const Node& n) { return read_sync(n, out); }}});
}

}  // namespace

Result<Plan> parse(std::string_view json) {
  if (json.size() > kDocumentMax.count)
    return error(Code::invalid_argument, "document: larger than %s",
                 format_bytes(kDocumentMax).c_str());
  WEFT_TRY(check_json(json, kLimits));
  Builder builder(json);
  if (!Json::sax_parse(json.begin(), json.end(), &builder)) {
    WEFT_CHECK(builder.error().has_value());
    return *builder.error();
  }
  const Node document{builder.tree()};
  WEFT_TRY(read_version(document));
  Plan plan;
  WEFT_TRY(read_document(document, plan));
  WEFT_TRY(validate(plan));
  return plan;
}

}  // namespace weft::plan
