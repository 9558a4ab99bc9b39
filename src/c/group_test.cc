// Several ranks, each a thread, through the C interface alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include "weft/c.h"

namespace {

using testing::HasSubstr;

constexpr const char* kSecret = "00112233445566778899aabbccddeeff";

std::string new_folder() {
  std::string pattern = testing::TempDir() + "/weft_c_XXXXXX";
  EXPECT_NE(mkdtemp(pattern.data()), nullptr);
  return pattern;
}

// The body owns the group and frees it.
void run_ranks(uint32_t ranks, const std::function<void(weft_group*, uint32_t rank)>& body) {
  const std::string folder = new_folder(), meeting = "file:" + folder + "/meeting";
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      weft_options options = WEFT_OPTIONS_INIT;
      options.rank = rank;
      options.size = ranks;
      options.rendezvous = meeting.c_str();
      options.secret = kSecret;
      options.trace = "";
      options.plan = "default";
      options.join_timeout_ms = 20000;
      weft_group* group = nullptr;
      const weft_status joined = weft_join(&options, &group);
      EXPECT_EQ(joined, WEFT_OK) << weft_last_error();
      if (joined == WEFT_OK) body(group, rank);
    });
  for (std::thread& thread : threads) thread.join();
  std::filesystem::remove_all(folder);
}

void leave_and_free(weft_group* group) {
  EXPECT_EQ(weft_leave(group), WEFT_OK) << weft_last_error();
  weft_free(group);
}

#define MUST(call) ASSERT_EQ((call), WEFT_OK) << weft_last_error()

TEST(Group, every_collective_in_short) {
  run_ranks(3, [](weft_group* group, uint32_t rank) {
    const auto r = static_cast<int32_t>(rank);
    int32_t sums[3] = {r, 10 * r, 100 * r};
    MUST(weft_all_reduce(group, nullptr, sums, 3, WEFT_INT32, WEFT_SUM));
    EXPECT_THAT(sums, testing::ElementsAre(3, 30, 300));

    const double parts[3] = {1.0 + r, 10.0 + r, 100.0 + r};
    double own = 0;
    MUST(weft_reduce_scatter(group, parts, &own, 3, WEFT_FLOAT64, WEFT_SUM));
    EXPECT_EQ(own, (r == 0 ? 3 : r == 1 ? 30 : 300) + 3.0);

    const int64_t mine = 7 * r;
    int64_t all[3] = {-1, -1, -1};
    MUST(weft_all_gather(group, &mine, all, 3, WEFT_INT64));
    EXPECT_THAT(all, testing::ElementsAre(0, 7, 14));

    const uint64_t counts[3] = {2, 0, 1};
    const uint8_t bytes[2] = {static_cast<uint8_t>(1 + r), static_cast<uint8_t>(5 + r)};
    uint8_t gathered[3] = {};
    MUST(weft_all_gatherv(group, bytes, gathered, counts, WEFT_UINT8));
    EXPECT_THAT(gathered, testing::ElementsAre(1, 5, 3));

    int16_t told = static_cast<int16_t>(r == 1 ? 42 : 0);
    MUST(weft_broadcast(group, &told, 1, WEFT_INT16, 1));
    EXPECT_EQ(told, 42);

    const float value = static_cast<float>(r) - 1;
    float least = 9;
    MUST(weft_reduce(group, &value, &least, 1, WEFT_FLOAT32, WEFT_MIN, 2));
    EXPECT_EQ(least, r == 2 ? -1.0f : 9.0f);

    int32_t collected[3] = {-1, -1, -1};
    MUST(weft_gather(group, &r, collected, 3, WEFT_INT32, 0));
    if (r == 0) {
      EXPECT_THAT(collected, testing::ElementsAre(0, 1, 2));
    }

    const int32_t dealt[3] = {5, 6, 7};
    int32_t card = 0;
    MUST(weft_scatter(group, r == 0 ? dealt : nullptr, &card, 3, WEFT_INT32, 0));
    EXPECT_EQ(card, 5 + r);

    const int32_t letters[3] = {10 * r, 10 * r + 1, 10 * r + 2};
    int32_t mail[3] = {};
    MUST(weft_all_to_all(group, letters, mail, 3, WEFT_INT32));
    EXPECT_THAT(mail, testing::ElementsAre(r, 10 + r, 20 + r));
    leave_and_free(group);
  });
}

TEST(Group, all_to_all_with_counts_and_messages_between_two) {
  run_ranks(2, [](weft_group* group, uint32_t rank) {
    // Rank 0 sends three to rank 1 and gets one.
    const uint64_t sends[2][2] = {{1, 3}, {1, 2}}, receives[2][2] = {{1, 1}, {3, 2}};
    const int32_t out[4] = {static_cast<int32_t>(rank), 11, 12, 13};
    int32_t in[5] = {};
    MUST(weft_all_to_allv(group, out, sends[rank], in, receives[rank], WEFT_INT32));
    if (rank == 0) {
      EXPECT_THAT(std::vector<int32_t>(in, in + 2), testing::ElementsAre(0, 1));
    } else {
      EXPECT_THAT(in, testing::ElementsAre(11, 12, 13, 11, 12));
    }
    const uint64_t huge[2] = {UINT64_MAX, 2};
    EXPECT_EQ(weft_all_to_allv(group, out, huge, in, huge, WEFT_INT32), WEFT_INVALID_ARGUMENT);

    std::vector<float> message(5000, rank == 0 ? 3.5f : 0.0f);
    if (rank == 0) {
      MUST(weft_send(group, message.data(), message.size(), WEFT_FLOAT32, 1));
    } else {
      MUST(weft_receive(group, message.data(), message.size(), WEFT_FLOAT32, 0));
    }
    EXPECT_EQ(message, std::vector<float>(5000, 3.5f));
    EXPECT_EQ(weft_send(group, message.data(), 1, WEFT_FLOAT32, rank), WEFT_INVALID_ARGUMENT);
    leave_and_free(group);
  });
}

struct Told {
  std::atomic<int> calls = 0;
  std::atomic<weft_status> status = WEFT_OK;
  std::string message;  // written before `calls`
};

void tell(void* data, weft_status status, const char* message) {
  auto* told = static_cast<Told*>(data);
  told->message = message;
  told->status = status;
  ++told->calls;
}

TEST(Work, many_are_in_flight_and_each_calls_back_once) {
  constexpr size_t kWorks = 40;
  std::vector<std::vector<Told>> told(3);
  for (auto& of_rank : told) of_rank = std::vector<Told>(kWorks);
  run_ranks(3, [&](weft_group* group, uint32_t rank) {
    std::vector<std::vector<float>> data(kWorks);
    std::vector<weft_work*> works(kWorks);
    for (size_t i = 0; i < kWorks; ++i) {
      data[i].assign(i * 500, static_cast<float>(i + rank));
      weft_call call = WEFT_CALL_INIT;
      call.output = data[i].data();
      call.count = data[i].size();
      if (i % 8 == 7) call.collective = WEFT_BARRIER;
      MUST(weft_start(group, &call, &works[i]));
      MUST(weft_on_done(works[i], tell, &told[rank][i]));
    }
    int done = 0;
    while (done == 0) {
      MUST(weft_test(works[0], &done));
    }
    for (size_t i = kWorks; i-- > 0;) {
      MUST(weft_wait(works[i]));
      weft_work_free(works[i]);
      if (i % 8 == 7) continue;
      EXPECT_EQ(data[i], std::vector<float>(i * 500, static_cast<float>(3 * i + 3)));
    }
    leave_and_free(group);
    for (const Told& one : told[rank]) {
      EXPECT_EQ(one.calls, 1);
      EXPECT_EQ(one.status, WEFT_OK);
      EXPECT_EQ(one.message, "");
    }
  });
}

TEST(Work, an_operation_goes_on_without_its_handle) {
  run_ranks(2, [](weft_group* group, uint32_t rank) {
    std::vector<float> data(100000, static_cast<float>(rank));
    weft_call call = WEFT_CALL_INIT;
    call.output = data.data();
    call.count = data.size();
    weft_work* work = nullptr;
    MUST(weft_start(group, &call, &work));
    Told told;
    MUST(weft_on_done(work, tell, &told));
    weft_work_free(work);
    while (told.calls == 0) std::this_thread::yield();
    leave_and_free(group);
    EXPECT_EQ(data, std::vector<float>(100000, 1));
  });
}

TEST(Work, is_cancelled_when_the_group_is_freed_before_it_is_done) {
  std::latch joined(2), freed(2);
  run_ranks(2, [&](weft_group* group, uint32_t rank) {
    joined.arrive_and_wait();
    Told told;
    float data[1] = {1};
    if (rank == 0) {
      weft_call call = WEFT_CALL_INIT;
      call.output = data;
      call.count = 1;
      weft_work* work = nullptr;
      MUST(weft_start(group, &call, &work));
      MUST(weft_on_done(work, tell, &told));
      weft_work_free(work);
      EXPECT_EQ(told.calls, 0);
      weft_free(group);
      EXPECT_EQ(told.calls, 1);
      EXPECT_EQ(told.status, WEFT_CANCELLED);
      EXPECT_THAT(told.message, HasSubstr("freed"));
    }
    freed.arrive_and_wait();
    if (rank == 1) weft_free(group);
  });
}

struct InCallback {
  weft_group* group = nullptr;
  weft_work* work = nullptr;
  float second[1] = {5};
  weft_work* started = nullptr;
  std::atomic<int> seen = 0;
};

// All that a callback may do, and what it may not.
void busy(void* data, weft_status status, const char*) {
  auto* own = static_cast<InCallback*>(data);
  EXPECT_EQ(status, WEFT_OK);
  EXPECT_EQ(weft_barrier(own->group), WEFT_INVALID_ARGUMENT);
  EXPECT_THAT(weft_last_error(), HasSubstr("callback"));
  EXPECT_EQ(weft_wait(own->work), WEFT_INVALID_ARGUMENT);
  EXPECT_EQ(weft_leave(own->group), WEFT_INVALID_ARGUMENT);
  weft_call call = WEFT_CALL_INIT;
  call.output = own->second;
  call.count = 1;
  EXPECT_EQ(weft_start(own->group, &call, &own->started), WEFT_OK) << weft_last_error();
  ++own->seen;
}

TEST(Callback, may_start_work_but_not_wait) {
  run_ranks(2, [](weft_group* group, uint32_t) {
    InCallback own;
    own.group = group;
    float data[1] = {1};
    weft_call call = WEFT_CALL_INIT;
    call.output = data;
    call.count = 1;
    MUST(weft_start(group, &call, &own.work));
    MUST(weft_on_done(own.work, busy, &own));
    MUST(weft_wait(own.work));
    while (own.seen == 0) std::this_thread::yield();
    MUST(weft_wait(own.started));
    EXPECT_EQ(own.second[0], 10);
    weft_work_free(own.started);
    weft_work_free(own.work);
    leave_and_free(group);
  });
}

struct LastWords {
  weft_work* work = nullptr;
  std::atomic<bool> may_go = false;
  std::atomic<bool> gone = false;
};

void free_the_last_handle(void* data, weft_status status, const char*) {
  auto* own = static_cast<LastWords*>(data);
  EXPECT_EQ(status, WEFT_PEER_LOST);
  while (!own->may_go) std::this_thread::yield();
  weft_work_free(own->work);
  own->gone = true;
}

TEST(Callback, may_free_the_last_handle_though_the_groups_own_thread_runs_it) {
  LastWords own;
  std::latch joined(2);
  float data[1] = {1};
  run_ranks(2, [&](weft_group* group, uint32_t rank) {
    joined.arrive_and_wait();
    if (rank == 1) return weft_free(group);  // lost, from the other's point of view
    weft_call call = WEFT_CALL_INIT;
    call.output = data;
    call.count = 1;
    if (weft_start(group, &call, &own.work) == WEFT_OK) {
      MUST(weft_on_done(own.work, free_the_last_handle, &own));
      weft_free(group);
      own.may_go = true;
      while (!own.gone) std::this_thread::yield();
      return;
    }
    weft_free(group);  // the loss was seen before the work began
  });
}

TEST(Group, parts_of_it_work_by_themselves) {
  run_ranks(3, [](weft_group* group, uint32_t rank) {
    const uint32_t members[2] = {2, 0};
    weft_group* part = nullptr;
    if (rank == 1) {
      EXPECT_EQ(weft_subgroup(group, members, 2, &part), WEFT_INVALID_ARGUMENT);
    } else {
      MUST(weft_subgroup(group, members, 2, &part));
      uint32_t own = 9, size = 9;
      MUST(weft_rank(part, &own));
      MUST(weft_size(part, &size));
      EXPECT_EQ(own, rank == 2 ? 0u : 1u);
      EXPECT_EQ(size, 2u);
      int32_t value = static_cast<int32_t>(rank) + 1;
      MUST(weft_all_reduce(part, nullptr, &value, 1, WEFT_INT32, WEFT_SUM));
      EXPECT_EQ(value, 4);
      EXPECT_EQ(weft_leave(part), WEFT_INVALID_ARGUMENT);
      weft_exchange* exchange = nullptr;
      EXPECT_EQ(weft_exchange_create(part, nullptr, 0, &exchange), WEFT_UNSUPPORTED);
    }
    EXPECT_EQ(weft_subgroup(group, nullptr, 1, &part), WEFT_INVALID_ARGUMENT);
    EXPECT_EQ(weft_subgroup(group, members, 4, &part), WEFT_INVALID_ARGUMENT);
    weft_free(rank == 1 ? nullptr : part);
    leave_and_free(group);
  });
}

TEST(Exchange, sums_gradients_in_any_order) {
  run_ranks(2, [](weft_group* group, uint32_t rank) {
    std::vector<float> first(3000), second(70000);
    const weft_tensor tensors[2] = {
        {sizeof(weft_tensor), "first", first.data(), first.size(), 0, nullptr, WEFT_FLOAT32},
        {sizeof(weft_tensor), "second", nullptr, second.size(), 1, second.data(), WEFT_FLOAT32}};
    weft_exchange* exchange = nullptr;
    MUST(weft_exchange_create(group, tensors, 2, &exchange));
    for (uint64_t step = 0; step < 3; ++step) {
      first.assign(first.size(), static_cast<float>(step + rank));
      second.assign(second.size(), static_cast<float>(10 * step + rank));
      MUST(weft_exchange_ready(exchange, rank, step));
      MUST(weft_exchange_ready(exchange, 1 - rank, step));
      MUST(weft_exchange_wait(exchange, 0, step));
      EXPECT_EQ(first, std::vector<float>(first.size(), static_cast<float>(2 * step + 1)));
      MUST(weft_exchange_wait_all(exchange, step));
      EXPECT_EQ(second, std::vector<float>(second.size(), static_cast<float>(20 * step + 1)));
    }
    EXPECT_EQ(weft_leave(group), WEFT_OK);
    weft_free(group);
    weft_exchange_free(exchange);  // it keeps what it needs
  });
}

TEST(Failure, an_abort_ends_all_waits_and_the_rest_goes_on) {
  std::latch started(3), failed(3);
  run_ranks(3, [&](weft_group* group, uint32_t rank) {
    Told told;
    float data[1] = {1};
    weft_call call = WEFT_CALL_INIT;
    call.output = data;
    call.count = 1;
    weft_work* work = nullptr;
    if (rank != 2) {
      MUST(weft_start(group, &call, &work));
      MUST(weft_on_done(work, tell, &told));
      started.count_down();
      EXPECT_EQ(weft_wait(work), WEFT_CANCELLED);
      EXPECT_THAT(weft_last_error(), HasSubstr("no more of this"));
    } else {
      started.arrive_and_wait();
      MUST(weft_abort(group, "no more of this"));
      while (weft_barrier(group) == WEFT_OK) continue;
    }
    // Refused from now on, with the same words and the same rank.
    weft_status code = WEFT_OK;
    char* words = nullptr;
    int64_t culprit = -1;
    EXPECT_EQ(weft_barrier(group), WEFT_CANCELLED);
    MUST(weft_failure(group, &code, &words));
    MUST(weft_culprit(group, &culprit));
    EXPECT_EQ(code, WEFT_CANCELLED);
    EXPECT_THAT(words, HasSubstr("no more of this"));
    EXPECT_EQ(culprit, 2);
    weft_text_free(words);
    failed.arrive_and_wait();
    if (rank != 2) {
      weft_group* smaller = nullptr;
      MUST(weft_rebuild(group, 0, 0, &smaller));
      uint32_t size = 0;
      MUST(weft_size(smaller, &size));
      EXPECT_EQ(size, 2u);
      int32_t one = 1;
      MUST(weft_all_reduce(smaller, nullptr, &one, 1, WEFT_INT32, WEFT_SUM));
      EXPECT_EQ(one, 2);
      weft_work_free(work);
      leave_and_free(smaller);
    }
    weft_free(group);
    if (rank != 2) {
      EXPECT_EQ(told.calls, 1);
      EXPECT_EQ(told.status, WEFT_CANCELLED);
    }
  });
}

}  // namespace
