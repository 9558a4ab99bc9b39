// What a program says of its own work.
#include "handles.h"
#include "weft/c.h"

namespace weft::c {
namespace {

static_assert(WEFT_MARK_FORWARD == static_cast<int>(mark::What::forward));
static_assert(WEFT_MARK_HOST == static_cast<int>(mark::What::host));
static_assert(WEFT_NO_LAYER == trace::kNone);

constexpr size_t kLayersMax = trace::kNone16;

Result<mark::What> what_of(weft_mark given) {
  if (given >= WEFT_MARK_FORWARD && given <= WEFT_MARK_HOST) return static_cast<mark::What>(given);
  return error(Code::invalid_argument, "the mark is %d: expected %d to %d", static_cast<int>(given),
               static_cast<int>(WEFT_MARK_FORWARD), static_cast<int>(WEFT_MARK_HOST));
}

// Runs the body with the marks of the group's job.
template <typename Body>
weft_status with_marks(weft_group* group, Body body) noexcept {
  return guarded([&]() -> Result<void> {
    if (group == nullptr) return is_null("the group");
    return body(group->job->marks());
  });
}

}  // namespace
}  // namespace weft::c

using namespace weft;     // NOLINT(google-build-using-namespace): C has no names to qualify
using namespace weft::c;  // NOLINT(google-build-using-namespace)

weft_status weft_mark_layers(weft_group* group, const char* model, const char* const* layers,
                             size_t count) {
  return with_marks(group, [&](mark::Marks& marks) -> Result<void> {
    if (layers == nullptr && count > 0) return is_null("the list of layers");
    if (count >= kLayersMax)
      return error(Code::invalid_argument, "%zu layers: there may be %zu", count, kLayersMax - 1);
    trace::Model said = marks.model();
    if (model != nullptr) said.name = model;
    said.layers.clear();
    for (size_t i = 0; i < count; ++i) {
      if (layers[i] == nullptr)
        return error(Code::invalid_argument, "the name of layer %zu is null", i);
      said.layers.push_back({layers[i]});
    }
    return marks.model(said);
  });
}

weft_status weft_mark_iteration(weft_group* group, uint64_t number) {
  return with_marks(group, [&](mark::Marks& marks) { return marks.begin_iteration(number); });
}

weft_status weft_mark_iteration_end(weft_group* group) {
  return with_marks(group, [](mark::Marks& marks) { return marks.end_iteration(); });
}

weft_status weft_mark_begin(weft_group* group, weft_mark what, uint32_t layer, const char* name,
                            uint64_t* span) {
  return with_marks(group, [&](mark::Marks& marks) -> Result<void> {
    if (span == nullptr) return is_null("the place for the span's number");
    WEFT_ASSIGN(const mark::What known, what_of(what));
    mark::Place place;
    place.layer = layer;
    if (name != nullptr) place.name = name;
    WEFT_ASSIGN(*span, marks.open(known, place));
    return {};
  });
}

weft_status weft_mark_end(weft_group* group, uint64_t span) {
  return with_marks(group, [&](mark::Marks& marks) { return marks.close(span); });
}

weft_status weft_mark_memory(weft_group* group, const char* name, uint64_t bytes) {
  return with_marks(group, [&](mark::Marks& marks) -> Result<void> {
    marks.memory(name != nullptr ? name : "", bytes);
    return {};
  });
}
