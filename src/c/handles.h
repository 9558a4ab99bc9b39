// What stands behind the handles, and how every call keeps its promises: it returns a status, it
// leaves words behind, and it never throws.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <new>

#include "weft/api.h"
#include "weft/c.h"

namespace weft::c {

// A group's own thread calls back, and it can neither wait for itself nor join itself. So a thread
// knows whether it is inside a callback.
class CallingBack {
 public:
  CallingBack();
  ~CallingBack();
  CallingBack(const CallingBack&) = delete;
  CallingBack& operator=(const CallingBack&) = delete;
  static bool now();
};

// The last handle ends the job; inside a callback, another thread does it.
struct Farewell {
  void operator()(api::Job* job) const noexcept;
};
using SharedJob = std::shared_ptr<api::Job>;
SharedJob shared(std::unique_ptr<api::Job> job);

weft_status remember(const Error& error) noexcept;
weft_status remember_words(weft_status status, const char* words) noexcept;

// Runs the body of a call.
template <typename Body>
weft_status guarded(Body body) noexcept {
  try {
    Result<void> result = body();
    return result ? WEFT_OK : remember(result.error());
  } catch (const std::bad_alloc&) {
    return remember_words(WEFT_IO, "out of memory");
  } catch (const std::exception& exception) {
    return remember_words(WEFT_IO, exception.what());
  }
}

inline Error is_null(const char* what) { return error(Code::invalid_argument, "%s is null", what); }

inline Result<void> may_wait() {
  if (!CallingBack::now()) return {};
  return error(Code::invalid_argument, "a callback may not wait; start work and return instead");
}

// The size that a struct had in the first version of the interface: to the end of the last member
// of then, with its padding. It never changes. A member that is added later begins after it, also
// where padding would have room, because callers of the first version left that undefined.
template <typename Struct>
constexpr size_t first_size(size_t last_member, size_t its_size) {
  constexpr size_t kAlign = alignof(Struct);
  return (last_member + its_size + kAlign - 1) / kAlign * kAlign;
}
template <typename Struct>
constexpr size_t kFirstSize = 0;
template <>
inline constexpr size_t kFirstSize<weft_options> = first_size<weft_options>(
    offsetof(weft_options, progress_timeout_ms), sizeof(weft_options::progress_timeout_ms));
template <>
inline constexpr size_t kFirstSize<weft_call> = first_size<weft_call>(offsetof(weft_call, root),
                                                                      sizeof(weft_call::root));
template <>
inline constexpr size_t kFirstSize<weft_tensor> =
    first_size<weft_tensor>(offsetof(weft_tensor, layer), sizeof(weft_tensor::layer));

// A struct of a caller that may know fewer members than this library, which are 0 then, or more,
// which must be.
template <typename Struct>
Result<Struct> copied(const Struct* given, const char* what) {
  static_assert(kFirstSize<Struct> > 0, "say what its first version was");
  constexpr size_t kSizeMax = 4096;
  size_t size = 0;
  std::memcpy(&size, given, sizeof size);
  // No version has a size that its alignment does not divide; one that has would cut a member.
  if (size < kFirstSize<Struct> || size > kSizeMax || size % alignof(Struct) != 0)
    return error(Code::invalid_argument, "struct_size of %s is %zu: set it to sizeof(%s), %zu",
                 what, size, what, sizeof(Struct));
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (size_t i = sizeof(Struct); i < size; ++i)
    if (bytes[i] != 0)
      return error(Code::unsupported, "%s says something that weft %s does not know", what,
                   version());
  Struct out{};
  std::memcpy(&out, given, std::min(size, sizeof out));
  return out;
}

}  // namespace weft::c

// The job stands first in each: it is the last to go.
struct weft_group {
  weft::c::SharedJob job;
  std::unique_ptr<weft::Group> part;  // null: all ranks of the job
  weft::Group& get() const { return part ? *part : job->group(); }
};

struct weft_work {
  weft::c::SharedJob job;
  weft::Work work;
};

struct weft_exchange {
  weft::c::SharedJob job;
  std::unique_ptr<weft::Exchange> exchange;
};
