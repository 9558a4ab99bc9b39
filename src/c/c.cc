// Joining, operations and failure. The gradient exchange is in exchange.cc.
#include "weft/c.h"

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "handles.h"

namespace weft::c {
namespace {

thread_local int calling_back = 0;

struct LastError {
  std::string text;
  const char* words = "";  // into text, or a constant where there was no memory for a text
};
thread_local LastError last_error;

// Both sides number alike, so that a status is a code.
static_assert(WEFT_INVALID_ARGUMENT == static_cast<int>(Code::invalid_argument));
static_assert(WEFT_NOT_FOUND == static_cast<int>(Code::not_found));
static_assert(WEFT_CORRUPT == static_cast<int>(Code::corrupt));
static_assert(WEFT_UNSUPPORTED == static_cast<int>(Code::unsupported));
static_assert(WEFT_IO == static_cast<int>(Code::io));
static_assert(WEFT_PEER_LOST == static_cast<int>(Code::peer_lost));
static_assert(WEFT_TIMEOUT == static_cast<int>(Code::timeout));
static_assert(WEFT_CANCELLED == static_cast<int>(Code::cancelled));
static_assert(WEFT_EXHAUSTED == static_cast<int>(Code::exhausted));
static_assert(WEFT_FLOAT32 == static_cast<int>(Type::float32));
static_assert(WEFT_UINT8 == static_cast<int>(Type::uint8));
static_assert(WEFT_SUM == static_cast<int>(Op::sum));
static_assert(WEFT_BIT_XOR == static_cast<int>(Op::bit_xor));
static_assert(WEFT_ALL_REDUCE == static_cast<int>(Collective::all_reduce));
static_assert(WEFT_BARRIER == static_cast<int>(Collective::barrier));
static_assert(WEFT_SEND == static_cast<int>(Collective::point_to_point));
static_assert(WEFT_RING == static_cast<int>(Algorithm::ring));
static_assert(WEFT_DIRECT == static_cast<int>(Algorithm::direct));

weft_status status_of(const Error& error) { return static_cast<weft_status>(error.code()); }

}  // namespace

CallingBack::CallingBack() { ++calling_back; }
CallingBack::~CallingBack() { --calling_back; }
bool CallingBack::now() { return calling_back > 0; }

void Farewell::operator()(api::Job* job) const noexcept {
  if (!CallingBack::now()) {
    delete job;
    return;
  }
  try {
    std::thread([job] { delete job; }).detach();
  } catch (const std::exception& exception) {
    WEFT_LOG(c, warn, "a group that was freed in a callback is never closed: %s", exception.what());
  }
}

SharedJob shared(std::unique_ptr<api::Job> job) { return SharedJob(job.release(), Farewell{}); }

weft_status remember_words(weft_status status, const char* words) noexcept {
  try {
    last_error.text = words;
    last_error.words = last_error.text.c_str();
  } catch (const std::bad_alloc&) {
    last_error.words = "out of memory";
  }
  return status;
}

weft_status remember(const Error& error) noexcept {
  return remember_words(status_of(error), error.message().c_str());
}

namespace {

// ---- what callers say ----------------------------------------------------------------------

Result<std::optional<bool>> choice_of(weft_choice choice, const char* what) {
  switch (choice) {
    case WEFT_AS_ENVIRONMENT: return std::optional<bool>();
    case WEFT_YES: return std::optional(true);
    case WEFT_NO: return std::optional(false);
    default: break;
  }
  return error(Code::invalid_argument, "%s is %d: expected one of weft_choice", what,
               static_cast<int>(choice));
}

// What is too long becomes longer than any timeout that is allowed, and is refused as one.
Nanos millis(uint64_t count) {
  return {static_cast<int64_t>(std::min<uint64_t>(count, INT64_MAX / 1'000'000)) * 1'000'000};
}

Result<membership::Membership> membership_of(const weft_options& options) {
  membership::Membership membership;
  membership.rank = options.rank;
  membership.size = options.size;
  membership.host = options.host != nullptr ? options.host : "localhost";
  if (options.size > 1 && (options.rendezvous == nullptr || options.secret == nullptr))
    return error(Code::invalid_argument,
                 "options with a size above 1 need a rendezvous and a secret");
  if (options.rendezvous != nullptr) membership.rendezvous = options.rendezvous;
  membership.secret = options.secret != nullptr ? options.secret : membership::new_secret();
  return membership;
}

Result<api::JoinOptions> join_options_of(const weft_options* given) {
  api::JoinOptions out;
  if (given == nullptr) return out;
  WEFT_ASSIGN(const weft_options options, copied(given, "weft_options"));
  if (options.size > 0) {
    WEFT_ASSIGN(out.membership, membership_of(options));
  }
  if (options.plan != nullptr) {
    WEFT_ASSIGN(out.plan, plan::load(options.plan));
  }
  if (options.trace != nullptr) out.trace = options.trace;
  if (options.interface_name != nullptr) out.interface = options.interface_name;
  WEFT_ASSIGN(out.shared_memory, choice_of(options.shared_memory, "shared_memory"));
  WEFT_ASSIGN(out.probe, choice_of(options.probe, "probe"));
  if (options.join_timeout_ms > 0) out.join_timeout = millis(options.join_timeout_ms);
  if (options.progress_timeout_ms > 0) out.progress_timeout = millis(options.progress_timeout_ms);
  return out;
}

// A value of an enum of the caller as one of the runtime's, which fit into a byte.
template <typename Enum, typename Given>
Result<Enum> narrowed(Given given, Given last, const char* what) {
  const auto number = static_cast<long>(given);
  if (number < 1 || number > static_cast<long>(last))
    return error(Code::invalid_argument, "%s is %ld: expected 1 to %ld", what, number,
                 static_cast<long>(last));
  return static_cast<Enum>(number);
}

Result<Call> call_of(const weft_call& given, uint32_t ranks) {
  Call call;
  if (given.collective == WEFT_RECEIVE) {
    call.collective = Collective::point_to_point;
    call.sends = false;
  } else {
    WEFT_ASSIGN(call.collective, narrowed<Collective>(given.collective, WEFT_SEND, "collective"));
  }
  WEFT_ASSIGN(call.type, narrowed<Type>(given.type, WEFT_UINT8, "type"));
  WEFT_ASSIGN(call.op, narrowed<Op>(given.op, WEFT_BIT_XOR, "op"));
  if (given.algorithm != WEFT_BY_PLAN) {
    WEFT_ASSIGN(call.algorithm, narrowed<Algorithm>(given.algorithm, WEFT_DIRECT, "algorithm"));
  }
  call.input = given.input;
  call.output = given.output;
  call.count = given.count;
  call.root = given.root;
  call.priority = given.priority;
  if (given.counts != nullptr) call.counts = {given.counts, ranks};
  if (given.receive_counts != nullptr) call.receive_counts = {given.receive_counts, ranks};
  return call;
}

Result<void> run(weft_group* group, const weft_call& given) {
  if (group == nullptr) return is_null("the group");
  WEFT_TRY(may_wait());
  if (given.collective == WEFT_BARRIER) return group->get().barrier();
  WEFT_ASSIGN(const Call call, call_of(given, group->get().ranks()));
  return group->get().run(call);
}

Result<Work> start(weft_group& group, const weft_call& given) {
  if (given.collective != WEFT_BARRIER) {
    WEFT_ASSIGN(const Call call, call_of(given, group.get().ranks()));
    return group.get().start(call);
  }
  // A barrier moves a byte, which lives until it has arrived.
  auto byte = std::make_shared<uint8_t>(uint8_t{0});
  Call call;
  call.collective = Collective::barrier;
  call.output = byte.get();
  call.count = 1;
  call.type = Type::uint8;
  WEFT_ASSIGN(Work work, group.get().start(call));
  work.then([byte](const Result<void>&) {});
  return work;
}

// Adds up, as far as a call may go; more is refused there.
uint64_t sum(const uint64_t* counts, uint32_t ranks) {
  uint64_t total = 0;
  for (uint32_t i = 0; i < ranks; ++i)
    if (__builtin_add_overflow(total, counts[i], &total)) return UINT64_MAX;
  return total;
}

// ---- callbacks -----------------------------------------------------------------------------

// Tells the caller once, whatever becomes of the work.
class Promise {
 public:
  Promise(weft_callback callback, void* data) : callback_(callback), data_(data) {}
  ~Promise() { tell(WEFT_CANCELLED, "the group was freed before the work was done"); }
  Promise(const Promise&) = delete;
  Promise& operator=(const Promise&) = delete;

  void tell(weft_status status, const char* message) {
    if (callback_ == nullptr) return;
    const CallingBack here;
    std::exchange(callback_, nullptr)(data_, status, message);
  }

 private:
  weft_callback callback_;
  void* data_;
};

char* text_for_caller(const std::string& text) {
  auto* copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy == nullptr) throw std::bad_alloc();
  std::memcpy(copy, text.c_str(), text.size() + 1);
  return copy;
}

}  // namespace
}  // namespace weft::c

using namespace weft;     // NOLINT(google-build-using-namespace): C has no names to qualify
using namespace weft::c;  // NOLINT(google-build-using-namespace)

// ---- words ---------------------------------------------------------------------------------

const char* weft_version(void) { return version(); }

const char* weft_status_name(weft_status status) {
  if (status == WEFT_OK) return "ok";
  const bool known = status >= WEFT_INVALID_ARGUMENT && status <= WEFT_EXHAUSTED;
  return known ? code_name(static_cast<Code>(status)) : "unknown";
}

const char* weft_last_error(void) { return last_error.words; }

void weft_text_free(char* text) { std::free(text); }

// ---- joining -------------------------------------------------------------------------------

weft_status weft_join(const weft_options* options, weft_group** group) {
  return guarded([&]() -> Result<void> {
    if (group == nullptr) return is_null("the place for the group");
    WEFT_TRY(may_wait());
    WEFT_ASSIGN(const api::JoinOptions how, join_options_of(options));
    WEFT_ASSIGN(auto job, api::join(how));
    *group = new weft_group{shared(std::move(job)), nullptr};
    return {};
  });
}

weft_status weft_rank(const weft_group* group, uint32_t* rank) {
  return guarded([&]() -> Result<void> {
    if (group == nullptr || rank == nullptr) return is_null("the group or the place for the rank");
    *rank = group->get().rank().index;
    return {};
  });
}

weft_status weft_size(const weft_group* group, uint32_t* size) {
  return guarded([&]() -> Result<void> {
    if (group == nullptr || size == nullptr) return is_null("the group or the place for the size");
    *size = group->get().ranks();
    return {};
  });
}

weft_status weft_subgroup(weft_group* group, const uint32_t* ranks, size_t count,
                          weft_group** subgroup) {
  return guarded([&]() -> Result<void> {
    if (group == nullptr || subgroup == nullptr)
      return is_null("the group or the place for the new one");
    if (ranks == nullptr && count > 0) return is_null("the list of ranks");
    // No list without repetitions is longer; this also bounds what is read.
    if (count > group->get().ranks())
      return error(Code::invalid_argument, "%zu ranks for a group of %u", count,
                   group->get().ranks());
    WEFT_ASSIGN(auto part, group->get().subgroup({ranks, count}));
    *subgroup = new weft_group{group->job, std::move(part)};
    return {};
  });
}

weft_status weft_leave(weft_group* group) {
  return guarded([&]() -> Result<void> {
    if (group == nullptr) return is_null("the group");
    WEFT_TRY(may_wait());
    if (group->part)
      return error(Code::invalid_argument,
                   "ranks leave the whole job; a part of its ranks is only freed");
    return group->job->leave();
  });
}

void weft_free(weft_group* group) { delete group; }

// ---- operations ----------------------------------------------------------------------------

weft_status weft_run(weft_group* group, const weft_call* call) {
  return guarded([&]() -> Result<void> {
    if (call == nullptr) return is_null("the call");
    WEFT_ASSIGN(const weft_call given, copied(call, "weft_call"));
    return run(group, given);
  });
}

weft_status weft_start(weft_group* group, const weft_call* call, weft_work** work) {
  return guarded([&]() -> Result<void> {
    if (group == nullptr || call == nullptr || work == nullptr)
      return is_null("the group, the call or the place for the work");
    WEFT_ASSIGN(const weft_call given, copied(call, "weft_call"));
    auto handle = std::make_unique<weft_work>(weft_work{group->job, Work()});
    WEFT_ASSIGN(handle->work, start(*group, given));
    *work = handle.release();
    return {};
  });
}

weft_status weft_wait(weft_work* work) {
  return guarded([&]() -> Result<void> {
    if (work == nullptr) return is_null("the work");
    WEFT_TRY(may_wait());
    return work->work.wait();
  });
}

weft_status weft_test(weft_work* work, int* done) {
  return guarded([&]() -> Result<void> {
    if (work == nullptr || done == nullptr) return is_null("the work or the place for the answer");
    WEFT_TRY(may_wait());
    *done = work->work.test() ? 1 : 0;
    return {};
  });
}

weft_status weft_on_done(weft_work* work, weft_callback callback, void* data) {
  return guarded([&]() -> Result<void> {
    if (work == nullptr || callback == nullptr) return is_null("the work or the callback");
    auto promise = std::make_shared<Promise>(callback, data);
    work->work.then([promise](const Result<void>& result) {
      promise->tell(result ? WEFT_OK : status_of(result.error()),
                    result ? "" : result.error().message().c_str());
    });
    return {};
  });
}

void weft_work_free(weft_work* work) { delete work; }

namespace {

weft_call short_call(weft_collective collective, const void* input, void* output, uint64_t count,
                     weft_type type) {
  weft_call call = WEFT_CALL_INIT;
  call.collective = collective;
  call.input = input;
  call.output = output;
  call.count = count;
  call.type = type;
  return call;
}

weft_status run_short(weft_group* group, const weft_call& call) {
  return guarded([&] { return weft::c::run(group, call); });
}

}  // namespace

weft_status weft_all_reduce(weft_group* group, const void* input, void* output, uint64_t count,
                            weft_type type, weft_op op) {
  weft_call call = short_call(WEFT_ALL_REDUCE, input, output, count, type);
  call.op = op;
  return run_short(group, call);
}

weft_status weft_reduce_scatter(weft_group* group, const void* input, void* output, uint64_t count,
                                weft_type type, weft_op op) {
  weft_call call = short_call(WEFT_REDUCE_SCATTER, input, output, count, type);
  call.op = op;
  return run_short(group, call);
}

weft_status weft_all_gather(weft_group* group, const void* input, void* output, uint64_t count,
                            weft_type type) {
  return run_short(group, short_call(WEFT_ALL_GATHER, input, output, count, type));
}

weft_status weft_all_gatherv(weft_group* group, const void* input, void* output,
                             const uint64_t* counts, weft_type type) {
  return guarded([&]() -> Result<void> {
    if (group == nullptr || counts == nullptr) return is_null("the group or the counts");
    weft_call call = short_call(WEFT_ALL_GATHER, input, output, 0, type);
    call.counts = counts;
    call.count = sum(counts, group->get().ranks());
    return weft::c::run(group, call);
  });
}

weft_status weft_broadcast(weft_group* group, void* data, uint64_t count, weft_type type,
                           uint32_t root) {
  weft_call call = short_call(WEFT_BROADCAST, nullptr, data, count, type);
  call.root = root;
  return run_short(group, call);
}

weft_status weft_reduce(weft_group* group, const void* input, void* output, uint64_t count,
                        weft_type type, weft_op op, uint32_t root) {
  weft_call call = short_call(WEFT_REDUCE, input, output, count, type);
  call.op = op;
  call.root = root;
  return run_short(group, call);
}

weft_status weft_gather(weft_group* group, const void* input, void* output, uint64_t count,
                        weft_type type, uint32_t root) {
  weft_call call = short_call(WEFT_GATHER, input, output, count, type);
  call.root = root;
  return run_short(group, call);
}

weft_status weft_scatter(weft_group* group, const void* input, void* output, uint64_t count,
                         weft_type type, uint32_t root) {
  weft_call call = short_call(WEFT_SCATTER, input, output, count, type);
  call.root = root;
  return run_short(group, call);
}

weft_status weft_all_to_all(weft_group* group, const void* input, void* output, uint64_t count,
                            weft_type type) {
  return run_short(group, short_call(WEFT_ALL_TO_ALL, input, output, count, type));
}

weft_status weft_all_to_allv(weft_group* group, const void* input, const uint64_t* send_counts,
                             void* output, const uint64_t* receive_counts, weft_type type) {
  return guarded([&]() -> Result<void> {
    if (group == nullptr || send_counts == nullptr || receive_counts == nullptr)
      return is_null("the group or one of the lists of counts");
    weft_call call = short_call(WEFT_ALL_TO_ALL, input, output, 0, type);
    call.counts = send_counts;
    call.receive_counts = receive_counts;
    call.count = sum(send_counts, group->get().ranks());
    return weft::c::run(group, call);
  });
}

weft_status weft_barrier(weft_group* group) {
  return run_short(group, short_call(WEFT_BARRIER, nullptr, nullptr, 0, WEFT_UINT8));
}

weft_status weft_send(weft_group* group, const void* data, uint64_t count, weft_type type,
                      uint32_t to) {
  weft_call call = short_call(WEFT_SEND, data, nullptr, count, type);
  call.root = to;
  return run_short(group, call);
}

weft_status weft_receive(weft_group* group, void* data, uint64_t count, weft_type type,
                         uint32_t from) {
  weft_call call = short_call(WEFT_RECEIVE, nullptr, data, count, type);
  call.root = from;
  return run_short(group, call);
}

// ---- failure -------------------------------------------------------------------------------

weft_status weft_abort(weft_group* group, const char* reason) {
  return guarded([&]() -> Result<void> {
    if (group == nullptr) return is_null("the group");
    group->get().abort(reason != nullptr ? reason : "no reason given");
    return {};
  });
}

weft_status weft_failure(const weft_group* group, weft_status* code, char** text) {
  return guarded([&]() -> Result<void> {
    if (group == nullptr) return is_null("the group");
    const std::optional<Error> failure = group->get().failure();
    if (text != nullptr) *text = failure ? text_for_caller(failure->message()) : nullptr;
    if (code != nullptr) *code = failure ? status_of(*failure) : WEFT_OK;
    return {};
  });
}

weft_status weft_culprit(const weft_group* group, int64_t* rank) {
  return guarded([&]() -> Result<void> {
    if (group == nullptr || rank == nullptr) return is_null("the group or the place for the rank");
    const std::optional<Rank> culprit = group->get().culprit();
    *rank = culprit ? int64_t{culprit->index} : -1;
    return {};
  });
}

weft_status weft_rebuild(weft_group* group, uint64_t settle_ms, uint32_t least,
                         weft_group** rebuilt) {
  return guarded([&]() -> Result<void> {
    if (group == nullptr || rebuilt == nullptr)
      return is_null("the group or the place for the new one");
    WEFT_TRY(may_wait());
    constexpr uint64_t kSettle = 5000, kSettleMax = 3'600'000;
    if (settle_ms > kSettleMax)
      return error(Code::invalid_argument, "settling for %llu ms is too long: an hour at most",
                   static_cast<unsigned long long>(settle_ms));
    WEFT_ASSIGN(auto job, group->job->rebuild(millis(settle_ms > 0 ? settle_ms : kSettle), least));
    *rebuilt = new weft_group{shared(std::move(job)), nullptr};
    return {};
  });
}

weft_status weft_group_status(weft_group* group, char** json) {
  return guarded([&]() -> Result<void> {
    if (group == nullptr || json == nullptr) return is_null("the group or the place for the text");
    WEFT_TRY(may_wait());
    *json = text_for_caller(group->get().status());
    return {};
  });
}
