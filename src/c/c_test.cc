// What the C interface promises whatever the group does: statuses, words, sizes, nulls.
#include "weft/c.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "handles.h"
#include "plain_test.h"

namespace weft::c {

// A struct as a later header may have it: the last two members were not in the first version.
struct Grown {
  size_t struct_size;
  uint32_t first;
  const char* second_version;
  uint64_t third_version;
};

template <>
inline constexpr size_t kFirstSize<Grown> = first_size<Grown>(offsetof(Grown, first),
                                                              sizeof(Grown::first));

}  // namespace weft::c

namespace {

using testing::HasSubstr;
using weft::c::copied;
using weft::c::Grown;
using weft::c::kFirstSize;

// A group of one, whatever the environment of the test.
class Alone : public testing::Test {
 protected:
  void SetUp() override {
    weft_options options = WEFT_OPTIONS_INIT;
    options.size = 1;
    options.trace = "";
    options.plan = "default";
    ASSERT_EQ(weft_join(&options, &group_), WEFT_OK) << weft_last_error();
  }
  void TearDown() override { weft_free(group_); }

  weft_group* group_ = nullptr;
};

weft_tensor tensor_of(const char* name, float* data, uint64_t count, uint32_t layer) {
  weft_tensor out{};
  out.struct_size = sizeof out;
  out.name = name;
  out.data = data;
  out.count = count;
  out.layer = layer;
  return out;
}

TEST(Plain, a_program_in_c_compiles_and_runs) { EXPECT_EQ(plain_c_program(), 0); }

TEST(Words, statuses_have_names_and_the_library_a_version) {
  EXPECT_STREQ(weft_status_name(WEFT_OK), "ok");
  EXPECT_STREQ(weft_status_name(WEFT_PEER_LOST), "peer_lost");
  EXPECT_STREQ(weft_status_name(static_cast<weft_status>(77)), "unknown");
  EXPECT_THAT(weft_version(), testing::MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+"));
}

TEST(Words, errors_are_kept_by_thread_until_the_next) {
  ASSERT_EQ(weft_barrier(nullptr), WEFT_INVALID_ARGUMENT);
  EXPECT_STREQ(weft_last_error(), "the group is null");
  std::thread([] {
    EXPECT_STREQ(weft_last_error(), "");
    EXPECT_EQ(weft_wait(nullptr), WEFT_INVALID_ARGUMENT);
    EXPECT_STREQ(weft_last_error(), "the work is null");
  }).join();
  EXPECT_STREQ(weft_last_error(), "the group is null");
}

TEST(Null, handles_are_refused_and_nothing_is_freed_twice) {
  uint32_t number = 0;
  int done = 0;
  int64_t rank = 0;
  float data[1] = {0};
  uint64_t counts[1] = {1};
  weft_call call = WEFT_CALL_INIT;
  weft_group* group = nullptr;
  weft_work* work = nullptr;
  weft_exchange* exchange = nullptr;
  char* words = nullptr;
  uint64_t span = 0;
  const std::vector<weft_status> statuses = {
      weft_join(nullptr, nullptr),
      weft_rank(nullptr, &number),
      weft_size(nullptr, &number),
      weft_subgroup(nullptr, &number, 1, &group),
      weft_leave(nullptr),
      weft_run(nullptr, &call),
      weft_start(nullptr, &call, &work),
      weft_wait(nullptr),
      weft_test(nullptr, &done),
      weft_on_done(nullptr, nullptr, nullptr),
      weft_all_reduce(nullptr, nullptr, data, 1, WEFT_FLOAT32, WEFT_SUM),
      weft_reduce_scatter(nullptr, nullptr, data, 1, WEFT_FLOAT32, WEFT_SUM),
      weft_all_gather(nullptr, nullptr, data, 1, WEFT_FLOAT32),
      weft_all_gatherv(nullptr, nullptr, data, counts, WEFT_FLOAT32),
      weft_broadcast(nullptr, data, 1, WEFT_FLOAT32, 0),
      weft_reduce(nullptr, data, data, 1, WEFT_FLOAT32, WEFT_SUM, 0),
      weft_gather(nullptr, data, data, 1, WEFT_FLOAT32, 0),
      weft_scatter(nullptr, data, data, 1, WEFT_FLOAT32, 0),
      weft_all_to_all(nullptr, data, data, 1, WEFT_FLOAT32),
      weft_all_to_allv(nullptr, data, counts, data, counts, WEFT_FLOAT32),
      weft_barrier(nullptr),
      weft_send(nullptr, data, 1, WEFT_FLOAT32, 0),
      weft_receive(nullptr, data, 1, WEFT_FLOAT32, 0),
      weft_exchange_create(nullptr, nullptr, 0, &exchange),
      weft_exchange_ready(nullptr, 0, 0),
      weft_exchange_wait(nullptr, 0, 0),
      weft_exchange_wait_all(nullptr, 0),
      weft_abort(nullptr, "x"),
      weft_failure(nullptr, nullptr, &words),
      weft_culprit(nullptr, &rank),
      weft_rebuild(nullptr, 0, 0, &group),
      weft_group_status(nullptr, &words),
      weft_exchange_ready_without(nullptr, 0, 0),
      weft_exchange_change_plan(nullptr, "default"),
      weft_mark_layers(nullptr, nullptr, nullptr, 0),
      weft_mark_iteration(nullptr, 0),
      weft_mark_iteration_end(nullptr),
      weft_mark_begin(nullptr, WEFT_MARK_FORWARD, 0, nullptr, &span),
      weft_mark_end(nullptr, 0),
      weft_mark_memory(nullptr, "x", 1)};
  for (size_t i = 0; i < statuses.size(); ++i) EXPECT_EQ(statuses[i], WEFT_INVALID_ARGUMENT) << i;
  EXPECT_EQ(group, nullptr);
  EXPECT_EQ(work, nullptr);
  EXPECT_EQ(exchange, nullptr);
  EXPECT_EQ(words, nullptr);
  weft_free(nullptr);
  weft_work_free(nullptr);
  weft_exchange_free(nullptr);
  weft_text_free(nullptr);
}

TEST_F(Alone, places_for_results_must_be_there) {
  weft_call call = WEFT_CALL_INIT;
  EXPECT_EQ(weft_rank(group_, nullptr), WEFT_INVALID_ARGUMENT);
  EXPECT_EQ(weft_size(group_, nullptr), WEFT_INVALID_ARGUMENT);
  EXPECT_EQ(weft_run(group_, nullptr), WEFT_INVALID_ARGUMENT);
  EXPECT_EQ(weft_start(group_, &call, nullptr), WEFT_INVALID_ARGUMENT);
  EXPECT_EQ(weft_all_gatherv(group_, nullptr, nullptr, nullptr, WEFT_INT8), WEFT_INVALID_ARGUMENT);
  EXPECT_EQ(weft_exchange_create(group_, nullptr, 1, nullptr), WEFT_INVALID_ARGUMENT);
  EXPECT_EQ(weft_culprit(group_, nullptr), WEFT_INVALID_ARGUMENT);
  EXPECT_EQ(weft_all_reduce(group_, nullptr, nullptr, 5, WEFT_INT8, WEFT_SUM),
            WEFT_INVALID_ARGUMENT);
  EXPECT_THAT(weft_last_error(), HasSubstr("null"));
}

TEST(Versions, a_struct_of_another_size_is_refused_or_understood) {
  weft_group* group = nullptr;
  weft_options options = WEFT_OPTIONS_INIT;
  options.size = 1;
  for (size_t size : {size_t{0}, sizeof options - 1, size_t{1} << 40}) {
    options.struct_size = size;
    EXPECT_EQ(weft_join(&options, &group), WEFT_INVALID_ARGUMENT);
    EXPECT_THAT(weft_last_error(), HasSubstr("struct_size of weft_options"));
  }
  // A caller that was built with a later header, and uses what is new there or does not.
  struct Later {
    weft_options known = WEFT_OPTIONS_INIT;
    uint64_t unknown = 0;
  } later;
  later.known.struct_size = sizeof later;
  later.known.size = 1;
  later.known.trace = "";
  later.unknown = 1;
  EXPECT_EQ(weft_join(&later.known, &group), WEFT_UNSUPPORTED);
  later.unknown = 0;
  EXPECT_EQ(weft_join(&later.known, &group), WEFT_OK) << weft_last_error();
  weft_free(group);
}

TEST(Versions, an_older_and_smaller_struct_is_understood) {
  const Grown full = {sizeof(Grown), 7, "said", 9};
  auto with_size = [&](size_t size) {
    Grown given = full;
    given.struct_size = size;
    // What lies behind an older caller's struct is not its own: nobody may look there.
    std::vector<unsigned char> memory(size);
    std::memcpy(memory.data(), &given, std::min(size, sizeof given));
    return copied(reinterpret_cast<const Grown*>(memory.data()), "grown");
  };
  auto first = with_size(offsetof(Grown, second_version));
  ASSERT_TRUE(first.ok()) << first.error().message();
  EXPECT_EQ(first->first, 7u);
  EXPECT_EQ(first->second_version, nullptr);
  EXPECT_EQ(first->third_version, 0u);
  auto second = with_size(offsetof(Grown, third_version));
  ASSERT_TRUE(second.ok()) << second.error().message();
  EXPECT_STREQ(second->second_version, "said");
  EXPECT_EQ(second->third_version, 0u);
  auto third = with_size(sizeof(Grown));
  ASSERT_TRUE(third.ok()) << third.error().message();
  EXPECT_EQ(third->third_version, 9u);
  // Less than the first version, and sizes that would cut a member in two.
  for (size_t size : {sizeof(size_t), offsetof(Grown, second_version) - 1,
                      offsetof(Grown, second_version) + 4, sizeof(Grown) - 1}) {
    auto refused = with_size(size);
    ASSERT_FALSE(refused.ok()) << size;
    EXPECT_EQ(refused.error().code(), weft::Code::invalid_argument);
    EXPECT_THAT(refused.error().message(), HasSubstr("struct_size of grown"));
  }
}

// What was published stays: these are the sizes of programs that exist.
TEST(Versions, the_first_ones_are_remembered) {
  if (sizeof(void*) != 8) GTEST_SKIP() << "written down for 64 bits";
  EXPECT_EQ(kFirstSize<weft_options>, 88u);
  EXPECT_EQ(kFirstSize<weft_call>, 80u);
  EXPECT_EQ(kFirstSize<weft_tensor>, 40u);
}

TEST(Join, refuses_options_that_cannot_be) {
  weft_group* group = nullptr;
  auto refused = [&](auto change) {
    weft_options options = WEFT_OPTIONS_INIT;
    options.size = 1;
    options.trace = "";
    change(options);
    EXPECT_NE(weft_join(&options, &group), WEFT_OK);
    return std::string(weft_last_error());
  };
  EXPECT_THAT(refused([](weft_options& o) { o.size = 2; }), HasSubstr("rendezvous"));
  EXPECT_THAT(refused([](weft_options& o) { o.rank = 1; }), HasSubstr("rank 1 of 1"));
  EXPECT_THAT(refused([](weft_options& o) { o.secret = "a short secret"; }),
              HasSubstr("the given secret has 14 characters"));
  EXPECT_THAT(refused([](weft_options& o) { o.plan = "nonsense"; }), HasSubstr("nonsense"));
  EXPECT_THAT(refused([](weft_options& o) { o.join_timeout_ms = UINT64_MAX; }),
              HasSubstr("timeout"));
  EXPECT_THAT(refused([](weft_options& o) { o.probe = static_cast<weft_choice>(9); }),
              HasSubstr("probe is 9"));
  EXPECT_EQ(group, nullptr);
}

TEST_F(Alone, calls_with_unknown_words_are_refused) {
  float data[2] = {1, 2};
  auto refused = [&](auto change) {
    weft_call call = WEFT_CALL_INIT;
    call.output = data;
    call.count = 2;
    change(call);
    EXPECT_EQ(weft_run(group_, &call), WEFT_INVALID_ARGUMENT);
    weft_work* work = nullptr;
    EXPECT_EQ(weft_start(group_, &call, &work), WEFT_INVALID_ARGUMENT);
    EXPECT_EQ(work, nullptr);
    return std::string(weft_last_error());
  };
  EXPECT_THAT(refused([](weft_call& c) { c.collective = static_cast<weft_collective>(99); }),
              HasSubstr("collective is 99"));
  // Not a type whose low byte is one.
  EXPECT_THAT(refused([](weft_call& c) { c.type = static_cast<weft_type>(257); }),
              HasSubstr("type is 257"));
  EXPECT_THAT(refused([](weft_call& c) { c.op = static_cast<weft_op>(0); }), HasSubstr("op is 0"));
  EXPECT_THAT(refused([](weft_call& c) { c.algorithm = static_cast<weft_algorithm>(7); }),
              HasSubstr("algorithm is 7"));
  EXPECT_THAT(refused([](weft_call& c) { c.op = WEFT_BIT_AND; }), HasSubstr("not possible"));
  EXPECT_THAT(refused([](weft_call& c) { c.struct_size = 4; }), HasSubstr("struct_size"));
  EXPECT_THAT(refused([](weft_call& c) { c.root = 1; }), HasSubstr("rank 1"));
}

TEST_F(Alone, lists_of_tensors_are_checked_one_by_one) {
  float data[2] = {1, 2};
  weft_exchange* exchange = nullptr;
  std::array<weft_tensor, 2> tensors = {
      {tensor_of("a", data, 1, 0), tensor_of("b", data + 1, 1, 1)}};
  auto refused = [&](auto change) {
    auto changed = tensors;
    change(changed);
    EXPECT_EQ(weft_exchange_create(group_, changed.data(), changed.size(), &exchange),
              WEFT_INVALID_ARGUMENT);
    return std::string(weft_last_error());
  };
  EXPECT_THAT(refused([](auto& t) { t[1].struct_size = 0; }), HasSubstr("struct_size"));
  EXPECT_THAT(refused([](auto& t) { t[1].name = nullptr; }), HasSubstr("tensor 1"));
  EXPECT_THAT(refused([](auto& t) { t[0].data = nullptr; }), HasSubstr("tensor 0"));
  EXPECT_THAT(refused([](auto& t) { t[0].count = UINT64_MAX; }), HasSubstr("tensor 0"));
  EXPECT_THAT(refused([](auto& t) { t[0].layer = UINT32_MAX; }), HasSubstr("layer"));
  EXPECT_EQ(weft_exchange_create(group_, tensors.data(), SIZE_MAX, &exchange),
            WEFT_INVALID_ARGUMENT);
  EXPECT_EQ(exchange, nullptr);
  ASSERT_EQ(weft_exchange_create(group_, tensors.data(), tensors.size(), &exchange), WEFT_OK)
      << weft_last_error();
  EXPECT_EQ(weft_exchange_ready(exchange, 2, 0), WEFT_INVALID_ARGUMENT);
  EXPECT_EQ(weft_exchange_wait(exchange, 2, 0), WEFT_INVALID_ARGUMENT);
  weft_exchange_free(exchange);
}

TEST_F(Alone, an_exchange_takes_another_plan_between_two_steps) {
  float data[2] = {1, 2};
  weft_exchange* exchange = nullptr;
  const weft_tensor tensor = tensor_of("a", data, 2, 0);
  ASSERT_EQ(weft_exchange_create(group_, &tensor, 1, &exchange), WEFT_OK) << weft_last_error();
  for (uint64_t step = 0; step < 4; ++step) {
    ASSERT_EQ(weft_exchange_ready(exchange, 0, step), WEFT_OK) << weft_last_error();
    ASSERT_EQ(weft_exchange_wait(exchange, 0, step), WEFT_OK) << weft_last_error();
    EXPECT_EQ(weft_exchange_change_plan(exchange, step % 2 == 0 ? "ddp" : "default"), WEFT_OK)
        << weft_last_error();
  }
  EXPECT_EQ(weft_exchange_change_plan(exchange, nullptr), WEFT_INVALID_ARGUMENT);
  EXPECT_THAT(weft_last_error(), HasSubstr("the plan is null; the plan before goes on"));
  EXPECT_NE(weft_exchange_change_plan(exchange, "/no/such/plan.json"), WEFT_OK);
  EXPECT_THAT(weft_last_error(), HasSubstr("the plan before goes on"));
  EXPECT_EQ(weft_exchange_ready(exchange, 0, 4), WEFT_OK);
  EXPECT_EQ(weft_exchange_wait(exchange, 0, 4), WEFT_OK);
  weft_exchange_free(exchange);
}

TEST_F(Alone, tensors_have_a_type_and_memory_of_it) {
  uint16_t half[4] = {0x3c00, 0, 0, 0};  // 1 in fp16
  float data[2] = {1, 2};
  weft_exchange* exchange = nullptr;
  weft_tensor tensor = tensor_of("h", nullptr, 4, 0);
  tensor.memory = half;
  tensor.type = WEFT_FLOAT16;
  auto refused = [&](auto change) {
    weft_tensor changed = tensor;
    change(changed);
    EXPECT_EQ(weft_exchange_create(group_, &changed, 1, &exchange), WEFT_INVALID_ARGUMENT);
    return std::string(weft_last_error());
  };
  EXPECT_THAT(refused([&](weft_tensor& t) { t.data = data; }), HasSubstr("both"));
  EXPECT_THAT(refused([](weft_tensor& t) { t.type = WEFT_INT32; }), HasSubstr("int32"));
  EXPECT_THAT(refused([](weft_tensor& t) { t.type = static_cast<weft_type>(77); }),
              HasSubstr("is 77"));
  EXPECT_THAT(refused([](weft_tensor& t) { t.memory = nullptr; }), HasSubstr("null"));
  // A program that was built when tensors were fp32.
  weft_tensor first = tensor_of("f", data, 2, 0);
  first.struct_size = kFirstSize<weft_tensor>;
  first.memory = half;  // beyond its end: not read
  static_assert(kFirstSize<weft_tensor> == offsetof(weft_tensor, memory));
  ASSERT_EQ(weft_exchange_create(group_, &first, 1, &exchange), WEFT_OK) << weft_last_error();
  EXPECT_EQ(weft_exchange_ready_without(exchange, 0, 0), WEFT_OK) << weft_last_error();
  EXPECT_EQ(weft_exchange_wait(exchange, 0, 0), WEFT_OK);
  EXPECT_EQ(data[1], 0);
  EXPECT_EQ(weft_exchange_ready_without(exchange, 0, 5), WEFT_INVALID_ARGUMENT);
  weft_exchange_free(exchange);
}

TEST_F(Alone, marks_do_nothing_where_nothing_is_recorded) {
  uint64_t span = 7;
  EXPECT_EQ(weft_mark_iteration(group_, 3), WEFT_OK);
  EXPECT_EQ(weft_mark_begin(group_, WEFT_MARK_FORWARD, 9, nullptr, &span), WEFT_OK);
  EXPECT_EQ(span, 0u);
  EXPECT_EQ(weft_mark_end(group_, span), WEFT_OK);
  EXPECT_EQ(weft_mark_iteration_end(group_), WEFT_OK);
  EXPECT_EQ(weft_mark_memory(group_, "x", 1), WEFT_OK);
}

TEST(Marks, are_recorded_and_what_makes_no_sense_is_refused) {
  std::string folder = testing::TempDir() + "/weft_c_marks_XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  weft_options options = WEFT_OPTIONS_INIT;
  options.size = 1;
  options.trace = folder.c_str();
  weft_group* group = nullptr;
  ASSERT_EQ(weft_join(&options, &group), WEFT_OK) << weft_last_error();
  const char* layers[2] = {"first", "second"};
  const char* broken[2] = {"first", nullptr};
  EXPECT_EQ(weft_mark_layers(group, "m", broken, 2), WEFT_INVALID_ARGUMENT);
  EXPECT_EQ(weft_mark_layers(group, "m", nullptr, 2), WEFT_INVALID_ARGUMENT);
  ASSERT_EQ(weft_mark_layers(group, "m", layers, 2), WEFT_OK) << weft_last_error();
  EXPECT_EQ(weft_mark_layers(group, "m", layers, 1), WEFT_INVALID_ARGUMENT);
  uint64_t span = 0;
  EXPECT_EQ(weft_mark_iteration(group, 0), WEFT_OK);
  EXPECT_EQ(weft_mark_begin(group, WEFT_MARK_FORWARD, 1, nullptr, &span), WEFT_OK);
  EXPECT_EQ(weft_mark_end(group, span), WEFT_OK);
  EXPECT_EQ(weft_mark_end(group, span), WEFT_INVALID_ARGUMENT);
  EXPECT_THAT(weft_last_error(), HasSubstr("has ended"));
  EXPECT_EQ(weft_mark_begin(group, WEFT_MARK_HOST, WEFT_NO_LAYER, "log", &span), WEFT_OK);
  EXPECT_EQ(weft_mark_end(group, span), WEFT_OK);
  EXPECT_EQ(weft_mark_begin(group, static_cast<weft_mark>(0), 0, nullptr, &span),
            WEFT_INVALID_ARGUMENT);
  EXPECT_EQ(weft_mark_begin(group, WEFT_MARK_FORWARD, 2, nullptr, &span), WEFT_INVALID_ARGUMENT);
  EXPECT_EQ(weft_mark_begin(group, WEFT_MARK_FORWARD, 0, nullptr, nullptr), WEFT_INVALID_ARGUMENT);
  EXPECT_EQ(weft_mark_memory(group, "resident", 42), WEFT_OK);
  EXPECT_EQ(weft_mark_iteration_end(group), WEFT_OK);
  EXPECT_EQ(weft_mark_iteration_end(group), WEFT_INVALID_ARGUMENT);
  EXPECT_EQ(weft_leave(group), WEFT_OK);
  weft_free(group);
  auto file = weft::trace::read_process(folder + "/rank-0.weft");
  ASSERT_TRUE(file.ok()) << file.error().message();
  EXPECT_EQ(file->process.model.name, "m");
  size_t forwards = 0, iterations = 0, named = 0, memory = 0;
  for (const weft::trace::Event& event : file->process.events) {
    forwards += event.kind == weft::trace::Kind::forward && event.layer == 1;
    iterations += event.kind == weft::trace::Kind::iteration;
    named += event.kind == weft::trace::Kind::host && file->process.label(event) == "log";
    memory += event.kind == weft::trace::Kind::memory && event.duration_ns == 42;
  }
  EXPECT_EQ(forwards, 1u);
  EXPECT_EQ(iterations, 1u);
  EXPECT_EQ(named, 1u);
  EXPECT_EQ(memory, 1u);
  std::filesystem::remove_all(folder);
}

TEST_F(Alone, a_healthy_group_has_no_failure_and_is_not_rebuilt) {
  weft_status code = WEFT_IO;
  char* words = nullptr;
  int64_t culprit = 5;
  EXPECT_EQ(weft_failure(group_, &code, &words), WEFT_OK);
  EXPECT_EQ(code, WEFT_OK);
  EXPECT_EQ(words, nullptr);
  EXPECT_EQ(weft_culprit(group_, &culprit), WEFT_OK);
  EXPECT_EQ(culprit, -1);
  weft_group* rebuilt = nullptr;
  EXPECT_EQ(weft_rebuild(group_, 0, 0, &rebuilt), WEFT_INVALID_ARGUMENT);
  EXPECT_EQ(weft_rebuild(group_, UINT64_MAX, 0, &rebuilt), WEFT_INVALID_ARGUMENT);
  EXPECT_EQ(rebuilt, nullptr);
  ASSERT_EQ(weft_group_status(group_, &words), WEFT_OK);
  EXPECT_THAT(words, HasSubstr("\"rank\""));
  weft_text_free(words);
}

TEST_F(Alone, handles_may_be_freed_in_any_order) {
  float data[2] = {1, 2};
  weft_tensor tensor = tensor_of("t", data, 2, 0);
  weft_exchange* exchange = nullptr;
  ASSERT_EQ(weft_exchange_create(group_, &tensor, 1, &exchange), WEFT_OK);
  weft_call call = WEFT_CALL_INIT;
  call.output = data;
  call.count = 2;
  weft_work* work = nullptr;
  ASSERT_EQ(weft_start(group_, &call, &work), WEFT_OK);
  const uint32_t self = 0;
  weft_group* part = nullptr;
  ASSERT_EQ(weft_subgroup(group_, &self, 1, &part), WEFT_OK) << weft_last_error();
  weft_free(group_);
  group_ = nullptr;
  EXPECT_EQ(weft_wait(work), WEFT_OK);
  EXPECT_EQ(weft_barrier(part), WEFT_OK) << weft_last_error();
  EXPECT_EQ(weft_exchange_ready(exchange, 0, 0), WEFT_OK);
  EXPECT_EQ(weft_exchange_wait_all(exchange, 0), WEFT_OK);
  weft_free(part);
  weft_work_free(work);
  weft_exchange_free(exchange);
}

}  // namespace
