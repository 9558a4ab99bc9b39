#include "protocol.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include "weft/bench.h"

namespace weft::bench {
namespace {

TEST(Protocol, ARequestSurvivesTheLine) {
  Request request{"reduce-scatter", "int64", "max", 1ull << 40, 3, 7, true, 262144};
  auto read = read_request(write_request(request));
  ASSERT_TRUE(read.ok()) << read.error().message();
  EXPECT_EQ(read->collective, request.collective);
  EXPECT_EQ(read->type, request.type);
  EXPECT_EQ(read->op, request.op);
  EXPECT_EQ(read->count, request.count);
  EXPECT_EQ(read->warmups, request.warmups);
  EXPECT_EQ(read->iterations, request.iterations);
  EXPECT_EQ(read->check, request.check);
  EXPECT_EQ(read->setting, request.setting);
}

TEST(Protocol, NonsenseIsRefused) {
  for (const char* line : {"", "measure", "measure allreduce float32 sum", "done 1",
                           "measure allreduce float32 sum x 1 1 0 0"})
    EXPECT_FALSE(read_request(line).ok()) << line;
  for (const char* line : {"", "hello", "hello 1", "goodbye 1 2 x"})
    EXPECT_FALSE(read_hello(line).ok()) << line;
  for (const char* line : {"", "done", "done 1", "done nan 0", "done -1 0", "done inf 0"}) {
    auto answer = read_answer(line);
    ASSERT_FALSE(answer.ok()) << line;
    EXPECT_EQ(answer.error().code(), Code::corrupt) << line;
  }
}

TEST(Protocol, AnErrorKeepsTheWorkersWords) {
  auto answer = read_answer("error Horovod has no send and receive");
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.error().code(), Code::unsupported);
  EXPECT_EQ(answer.error().message(), "Horovod has no send and receive");
  auto good = read_answer(write_answer({0.125, 3}));
  ASSERT_TRUE(good.ok());
  EXPECT_EQ(good->seconds, 0.125);
  EXPECT_EQ(good->wrong, 3u);
}

TEST(Protocol, LinesArriveWholeHoweverTheyAreCut) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  Lines reader{Fd(ends[0])};
  Fd writer(ends[1]);
  ASSERT_EQ(::send(writer.get(), "hello 0 1", 9, 0), 9);
  auto nothing = reader.read_available();
  ASSERT_TRUE(nothing.ok());
  EXPECT_FALSE(nothing->has_value());
  ASSERT_EQ(::send(writer.get(), "2 x\ndone", 8, 0), 8);
  auto line = reader.read_available();
  ASSERT_TRUE(line.ok());
  EXPECT_EQ(line->value_or(""), "hello 0 12 x");
  writer.reset();
  auto end = reader.read();
  ASSERT_TRUE(end.ok());
  EXPECT_FALSE(end->has_value());
  EXPECT_TRUE(reader.ended());
}

TEST(Protocol, ALineWithoutEndIsRefused) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  Lines reader{Fd(ends[0])};
  Fd writer(ends[1]);
  const std::string endless(16384, 'x');
  ASSERT_EQ(::send(writer.get(), endless.data(), endless.size(), 0),
            static_cast<ssize_t>(endless.size()));
  auto line = reader.read();
  ASSERT_FALSE(line.ok());
  EXPECT_EQ(line.error().code(), Code::corrupt);
}

TEST(Collective, BusBandwidthIsThatOfNcclTests) {
  EXPECT_DOUBLE_EQ(bus_factor("allreduce", 4), 1.5);
  EXPECT_DOUBLE_EQ(bus_factor("allreduce", 2), 1);
  for (const char* name : {"reduce-scatter", "all-gather", "all-to-all"})
    EXPECT_DOUBLE_EQ(bus_factor(name, 4), 0.75) << name;
  for (const char* name : {"broadcast", "sendrecv"}) EXPECT_DOUBLE_EQ(bus_factor(name, 4), 1);
}

TEST(Collective, RefusesWhatItDoesNotKnowBeforeStartingAnything) {
  const auto refused = [](auto change) {
    CollectiveOptions options;
    change(options);
    auto result = measure_collective(options, {});
    return result ? std::string("accepted") : result.error().message();
  };
  using O = CollectiveOptions;
  EXPECT_EQ(refused([](O& o) { o.peers = {"nccl"}; }),
            "peer \"nccl\"; expected one of gloo, openmpi, mpich, horovod, horovod-mpi");
  EXPECT_EQ(refused([](O& o) { o.ranks = 0; }), "0 ranks; expected 1 to 64");
  EXPECT_EQ(refused([](O& o) { o.from = mib(2), o.to = mib(1); }),
            "sizes from 2MiB to 1MiB; expected 1 byte to 4 GiB, rising");
  EXPECT_EQ(refused([](O& o) { o.op = "median"; }),
            "operation \"median\"; expected one of sum, min, max");
}

}  // namespace
}  // namespace weft::bench
