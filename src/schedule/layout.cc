#include <algorithm>
#include <cmath>
#include <limits>

#include "cut.h"
#include "weft/schedule.h"

namespace weft::schedule {
namespace {

constexpr uint64_t kSmallestChunkElements = 256;  // 1 KiB: below, headers outweigh data

uint64_t whole_elements(Bytes bytes) { return std::max<uint64_t>(1, bytes.count / kElementBytes); }

Bytes divided(Bytes bytes, double shrink, Bytes floor) {
  auto smaller = static_cast<uint64_t>(std::llround(static_cast<double>(bytes.count) / shrink));
  return {std::max(std::min(floor.count, bytes.count), smaller)};
}

// Adds the next bucket with what is in `members`, and leaves that empty.
void close_bucket(std::vector<uint32_t>& members, std::vector<Bucket>& buckets) {
  if (members.empty()) return;
  Bucket bucket;
  bucket.tensors = std::move(members);
  buckets.push_back(std::move(bucket));
  members.clear();
}

// The bucket of one type that is being filled by the rule.
struct Open {
  uint8_t type = 0;
  std::vector<uint32_t> members;
  uint64_t filled = 0;
  bool first = true;
};

}  // namespace

Result<void> supported(const plan::Plan& plan) {
  auto refuse = [](const std::string& path, const std::string& found, const char* expected) {
    return error(Code::unsupported, "plan %s: \"%s\" is not supported by this runtime; expected %s",
                 path.c_str(), found.c_str(), expected);
  };
  if (plan.sync != plan::Sync::synchronous)
    return refuse("/sync/mode", plan::name_of(plan.sync), "\"synchronous\"");
  if (plan.codec != "none") return refuse("/codec", plan.codec, "\"none\"");
  for (size_t i = 0; i < plan.buckets.size(); ++i)
    if (plan.buckets[i].codec && *plan.buckets[i].codec != "none")
      return refuse(text("/buckets/%zu/codec", i), *plan.buckets[i].codec, "\"none\"");
  return {};
}

uint64_t chunk_elements(const plan::Plan& plan) {
  return std::max(kSmallestChunkElements, whole_elements(plan.chunk));
}

plan::Plan scaled(const plan::Plan& plan, double shrink) {
  WEFT_CHECK(shrink >= 1);
  plan::Plan out = plan;
  Bytes element{kElementBytes};
  out.bucket_rule.first = divided(plan.bucket_rule.first, shrink, element);
  out.bucket_rule.size = divided(plan.bucket_rule.size, shrink, element);
  if (plan.partition) out.partition = divided(*plan.partition, shrink, kib(1));
  if (plan.credit) out.credit = divided(*plan.credit, shrink, element);
  for (plan::AlgorithmRule& rule : out.algorithm)
    if (rule.up_to) rule.up_to = divided(*rule.up_to, shrink, element);
  out.chunk = divided(plan.chunk, shrink, kib(1));
  return out;
}

Result<Layout> make_layout(const plan::Plan& plan, std::span<const Tensor> tensors) {
  WEFT_TRY(supported(plan));
  if (tensors.size() >= std::numeric_limits<uint32_t>::max())
    return error(Code::invalid_argument, "%zu tensors are too many", tensors.size());

  std::unordered_map<std::string, uint32_t> by_name;
  std::vector<std::string> names;
  for (uint32_t t = 0; t < tensors.size(); ++t) {
    names.push_back(tensors[t].name);
    if (!by_name.emplace(tensors[t].name, t).second)
      return error(Code::invalid_argument, "two tensors are named \"%s\"", tensors[t].name.c_str());
  }
  auto lookup = [&](const std::string& name, const std::string& path) -> Result<uint32_t> {
    auto found = by_name.find(name);
    if (found != by_name.end()) return found->second;
    auto near = nearest(name, names);
    return error(Code::invalid_argument, "plan %s: the job has no tensor \"%s\"%s", path.c_str(),
                 name.c_str(), near ? text("; did you mean \"%s\"?", near->c_str()).c_str() : "");
  };

  Layout layout;
  constexpr uint32_t kUnplaced = std::numeric_limits<uint32_t>::max();
  layout.bucket_of.assign(tensors.size(), kUnplaced);
  std::vector<std::optional<int64_t>> said_priority;
  std::vector<bool> placed(tensors.size(), false);

  std::vector<uint32_t> members;
  for (size_t b = 0; b < plan.buckets.size(); ++b) {
    for (const std::string& name : plan.buckets[b].tensors) {
      WEFT_ASSIGN(uint32_t t, lookup(name, text("/buckets/%zu/tensors", b)));
      if (placed[t])
        return error(Code::invalid_argument, "plan /buckets/%zu: tensor \"%s\" is in two buckets",
                     b, name.c_str());
      placed[t] = true;
      if (!members.empty() && tensors[members.front()].type != tensors[t].type)
        return error(
            Code::invalid_argument,
            "plan /buckets/%zu: tensors \"%s\" and \"%s\" have elements of different types, "
            "and a bucket has one",
            b, tensors[members.front()].name.c_str(), tensors[t].name.c_str());
      members.push_back(t);
    }
    close_bucket(members, layout.buckets);
    said_priority.push_back(plan.buckets[b].priority);
  }

  // The rest in the order in which backward makes them: the last layer's last tensor first. Each
  // type fills buckets of its own.
  std::vector<Open> open;
  for (size_t i = tensors.size(); i-- > 0;) {
    if (placed[i]) continue;
    const Tensor& tensor = tensors[i];
    auto at = std::find_if(open.begin(), open.end(),
                           [&](const Open& other) { return other.type == tensor.type; });
    if (at == open.end()) at = open.insert(open.end(), Open{tensor.type, {}});
    auto close = [&] {
      close_bucket(at->members, layout.buckets);
      at->filled = 0;
      at->first = false;
    };
    auto limit = [&] {
      return whole_elements(at->first ? plan.bucket_rule.first : plan.bucket_rule.size);
    };
    if (!plan.bucket_rule.may_exceed && !at->members.empty() &&
        at->filled + tensor.words() > limit())
      close();
    at->members.push_back(static_cast<uint32_t>(i));
    at->filled += tensor.words();
    if (at->filled >= limit()) close();
  }
  for (Open& left : open) close_bucket(left.members, layout.buckets);
  said_priority.resize(layout.buckets.size());

  std::unordered_map<uint32_t, int64_t> tensor_priority;
  for (const auto& [name, priority] : plan.priority) {
    WEFT_ASSIGN(uint32_t t, lookup(name, "/priority"));
    tensor_priority[t] = priority;
  }

  uint64_t piece_limit = plan.partition ? whole_elements(*plan.partition) : 0;
  for (uint32_t b = 0; b < layout.buckets.size(); ++b) {
    Bucket& bucket = layout.buckets[b];
    std::optional<int64_t> priority;
    bucket.element_bytes = tensors[bucket.tensors.front()].element_bytes;
    for (uint32_t t : bucket.tensors) {
      layout.bucket_of[t] = b;
      bucket.offsets.push_back(bucket.elements);
      bucket.elements += tensors[t].elements;
      // With order "ready" all are equal, so that the first eligible goes first.
      int64_t natural = plan.order == plan::Order::layer ? int64_t{tensors[t].layer} : 0;
      auto said = tensor_priority.find(t);
      int64_t own = said != tensor_priority.end() ? said->second : natural;
      priority = priority ? std::min(*priority, own) : own;
    }
    bucket.priority = said_priority[b].value_or(priority.value_or(0));

    // Pieces of nearly equal size: a small last one would cost a full latency for little data.
    uint64_t count = 1;
    const uint64_t words = Tensor::words_of(bucket.elements, bucket.element_bytes);
    if (piece_limit > 0 && words > 0) count = (words + piece_limit - 1) / piece_limit;
    if (count > std::numeric_limits<uint16_t>::max())
      return error(Code::invalid_argument,
                   "plan /partition: cuts a bucket of %s into %llu pieces; at most %u are possible",
                   format_bytes({bucket.elements * bucket.element_bytes}).c_str(),
                   static_cast<unsigned long long>(count),
                   unsigned{std::numeric_limits<uint16_t>::max()});
    bucket.first_piece = static_cast<uint32_t>(layout.pieces.size());
    bucket.pieces = static_cast<uint32_t>(count);
    for (uint64_t k = 0; k < count; ++k) {
      uint64_t first_element = cut(bucket.elements, k, count);
      uint64_t elements = cut(bucket.elements, k + 1, count) - first_element;
      layout.pieces.push_back({b, static_cast<uint16_t>(k), first_element, elements,
                               Tensor::words_of(elements, bucket.element_bytes)});
    }
  }

  layout.chunk_elements = chunk_elements(plan);
  layout.credit_elements = plan.credit ? whole_elements(*plan.credit) : 0;
  layout.lanes = plan.lanes;
  layout.barrier = plan.barrier;
  return layout;
}

std::vector<std::vector<uint32_t>> tensors_by_piece(const Layout& layout) {
  std::vector<std::vector<uint32_t>> out(layout.pieces.size());
  for (const Bucket& bucket : layout.buckets)
    for (size_t i = 0; i < bucket.tensors.size(); ++i) {
      uint64_t first = bucket.offsets[i];
      uint64_t end = i + 1 < bucket.tensors.size() ? bucket.offsets[i + 1] : bucket.elements;
      for (uint32_t p = bucket.first_piece; p < bucket.first_piece + bucket.pieces; ++p) {
        const Piece& piece = layout.pieces[p];
        bool overlaps = first < end && first < piece.first + piece.elements && piece.first < end;
        bool stands_in = first == end && p == bucket.first_piece;
        if (overlaps || stands_in) out[p].push_back(bucket.tensors[i]);
      }
    }
  return out;
}

}  // namespace weft::schedule
