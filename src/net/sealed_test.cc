// Sealed connections: any bytes in any pieces, and what somebody on the way can do to them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>

#include <cstring>

#include "weft/net.h"
#include "weft_testing/loopback.h"
#include "weft_testing/turns.h"

namespace weft::net {
namespace {

using testing::HasSubstr;
using Blob = std::vector<std::byte>;

std::span<const std::byte> bytes_of(std::string_view words) {
  return std::as_bytes(std::span(words));
}

Seal keys(bool connector, std::string_view secret = "a secret of the test",
          std::string_view nonce = "nonce", std::string_view context = "a lane") {
  return derive_seal(secret, bytes_of(nonce), bytes_of("another nonce"), bytes_of(context),
                     connector);
}

Blob noise(size_t size, uint64_t seed) {
  Blob out(size);
  Rng rng(seed);
  for (std::byte& byte : out) byte = std::byte(rng.below(256));
  return out;
}

void make_small(int fd) {
  int bytes = 4096;
  ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
}

// Two ends of one sealed connection.
struct Pair {
  Pair() : Pair(tcp_pair()) {}
  explicit Pair(std::pair<Fd, Fd> ends) {
    make_small(ends.first.get());
    make_small(ends.second.get());
    one = seal(adopt(std::move(ends.first)), keys(true));
    two = seal(adopt(std::move(ends.second)), keys(false));
  }
  std::unique_ptr<Socket> one, two;
};

// One direction of a connection: sends `all` in random gather lists and receives it in random
// scatter lists, as far as it goes now.
struct Stream {
  Stream(Socket& from_in, Socket& to_in, Blob all_in, uint64_t seed)
      : from(from_in), to(to_in), all(std::move(all_in)), rng(seed) {}
  static std::vector<iovec> cut(std::byte* at, size_t size, Rng& rng) {
    std::vector<iovec> parts;
    while (size > 0 && parts.size() < 40) {
      size_t here = rng.below(5) == 0 ? 0 : 1 + rng.below(std::min<size_t>(size, 90000));
      parts.push_back({at, here});
      at += here;
      size -= here;
    }
    return parts;
  }
  void turn() {
    if (sent < all.size()) {
      // What was refused is offered again, in other pieces and with more behind it.
      size_t least = refused;
      auto parts = cut(all.data() + sent, all.size() - sent, rng);
      size_t offered = 0;
      for (const iovec& part : parts) offered += part.iov_len;
      if (offered < least) parts = {{all.data() + sent, all.size() - sent}};
      ssize_t put = from.send(parts.data(), parts.size());
      if (put > 0) {
        sent += static_cast<size_t>(put);
        refused = 64u << 10;
      } else if (offered > 0) {
        ASSERT_EQ(put, -EAGAIN);
        refused = 64u << 10;
      }
      refused = std::min(refused, all.size() - sent);
    }
    Blob place(1 + rng.below(200000));
    auto parts = cut(place.data(), place.size(), rng);
    ssize_t got = to.receive(parts.data(), parts.size());
    if (got == -EAGAIN) return;
    size_t asked = 0;
    for (const iovec& part : parts) asked += part.iov_len;
    if (asked == 0) return;
    ASSERT_GT(got, 0) << to.problem();
    received.insert(received.end(), place.begin(), place.begin() + got);
  }
  bool done() const { return received.size() == all.size(); }
  Socket& from;
  Socket& to;
  Blob all, received;
  Rng rng;
  size_t sent = 0;
  size_t refused = 0;
};

TEST(Sealed, carries_any_bytes_in_any_pieces_both_ways) {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    SCOPED_TRACE(seed);
    Pair pair;
    Stream there(*pair.one, *pair.two, noise(3'000'000 + seed, seed), seed);
    Stream back(*pair.two, *pair.one, noise(700'000 + seed, seed + 50), seed + 99);
    Nanos deadline = monotonic_clock().now() + Nanos::from_seconds(20);
    while (!there.done() || !back.done()) {
      ASSERT_LT(monotonic_clock().now(), deadline);
      there.turn();
      back.turn();
      if (HasFatalFailure()) return;
    }
    EXPECT_TRUE(there.received == there.all);
    EXPECT_TRUE(back.received == back.all);
  }
}

TEST(Sealed, tells_the_end_of_the_connection_after_what_came_before) {
  Pair pair;
  iovec part{const_cast<char*>("words"), 5};
  ASSERT_EQ(pair.one->send(&part, 1), 5);
  pair.one.reset();
  char got[16];
  iovec place{got, sizeof got};
  ASSERT_EQ(pair.two->receive(&place, 1), 5);
  EXPECT_EQ(pair.two->receive(&place, 1), 0);
  EXPECT_EQ(pair.two->problem(), "");
}

// What one side writes, as somebody on the way sees it: records of `words`.
std::vector<Blob> overhear(const std::vector<std::string>& words) {
  auto [one, two] = tcp_pair();
  auto sender = seal(adopt(std::move(one)), keys(true));
  std::vector<Blob> records;
  for (const std::string& record : words) {
    iovec part{const_cast<char*>(record.data()), record.size()};
    EXPECT_EQ(sender->send(&part, 1), static_cast<ssize_t>(record.size()));
    records.emplace_back(4 + record.size() + 16);
    EXPECT_EQ(::recv(two.get(), records.back().data(), records.back().size(), MSG_WAITALL),
              static_cast<ssize_t>(records.back().size()));
  }
  return records;
}

struct Heard {
  std::string words;
  ssize_t outcome = 0;  // the last that receive() told
  std::string problem;
};

// What the other side makes of these bytes, after which the connection ends.
Heard hear(const std::vector<Blob>& records, const Seal& with = keys(false)) {
  auto [one, two] = tcp_pair();
  auto receiver = seal(adopt(std::move(two)), with);
  for (const Blob& record : records) EXPECT_TRUE(send_all(one.get(), record));
  one.reset();
  Heard out;
  for (int i = 0; i < 1000; ++i) {
    char place[7];
    iovec part{place, sizeof place};
    out.outcome = receiver->receive(&part, 1);
    if (out.outcome > 0) out.words.append(place, static_cast<size_t>(out.outcome));
    if (out.outcome == 0 || (out.outcome < 0 && out.outcome != -EAGAIN)) break;
    if (out.outcome == -EAGAIN) pause_ms(1);
  }
  out.problem = receiver->problem();
  EXPECT_EQ(out.problem.empty(), out.outcome != -EBADMSG && out.outcome != -ECONNRESET);
  return out;
}

const std::vector<std::string> kWords = {"the first record", "and one more", "the last of them"};

TEST(Sealed, nobody_on_the_way_can_read_it) {
  for (const Blob& record : overhear(kWords)) {
    std::string_view seen(reinterpret_cast<const char*>(record.data()), record.size());
    for (const char* word : {"record", "more", "last"})
      EXPECT_EQ(seen.find(word), std::string_view::npos);
  }
  EXPECT_EQ(hear(overhear(kWords)).words, kWords[0] + kWords[1] + kWords[2]);
}

TEST(Sealed, any_byte_that_was_changed_ends_it_and_is_never_given_out) {
  std::vector<Blob> good = overhear(kWords);
  for (size_t record = 0; record < good.size(); ++record)
    for (size_t at = 0; at < good[record].size(); ++at) {
      SCOPED_TRACE(text("record %zu, byte %zu", record, at));
      std::vector<Blob> bad = good;
      bad[record][at] ^= std::byte{0x10};
      Heard heard = hear(bad);
      // A length that was changed may say that more is to come.
      EXPECT_TRUE(heard.outcome == -EBADMSG || (at < 4 && heard.outcome == -ECONNRESET));
      std::string before;
      for (size_t i = 0; i < record; ++i) before += kWords[i];
      EXPECT_EQ(heard.words, before);
      EXPECT_THAT(heard.problem, HasSubstr(text("record %zu", record)));
    }
}

TEST(Sealed, records_that_are_repeated_moved_or_left_out_end_it) {
  std::vector<Blob> good = overhear(kWords);
  EXPECT_EQ(hear({good[0], good[0]}).outcome, -EBADMSG);
  EXPECT_THAT(hear({good[0], good[0]}).problem, HasSubstr("record 1 "));
  EXPECT_EQ(hear({good[1], good[0]}).outcome, -EBADMSG);
  EXPECT_EQ(hear({good[0], good[2]}).outcome, -EBADMSG);
  EXPECT_EQ(hear({good[0], good[2]}).words, kWords[0]);
}

TEST(Sealed, one_that_is_cut_off_inside_a_record_is_not_an_end) {
  std::vector<Blob> good = overhear(kWords);
  for (size_t size = 1; size < good[1].size(); ++size) {
    Heard heard = hear({good[0], Blob(good[1].begin(), good[1].begin() + ptrdiff_t(size))});
    EXPECT_EQ(heard.words, kWords[0]);
    EXPECT_EQ(heard.outcome, -ECONNRESET);
    EXPECT_THAT(heard.problem, HasSubstr("ended inside record 1"));
  }
  EXPECT_EQ(hear({good[0]}).outcome, 0) << "between two, its user knows whether that may be";
}

TEST(Sealed, a_length_that_cannot_be_is_refused_at_once) {
  for (uint32_t length : {0u, 65537u, 0x7fffffffu, 0xffffffffu}) {
    auto [one, two] = tcp_pair();
    auto receiver = seal(adopt(std::move(two)), keys(false));
    ASSERT_EQ(::send(one.get(), &length, sizeof length, 0), 4);
    char place[8];
    iovec part{place, sizeof place};
    ssize_t got = -EAGAIN;
    for (int i = 0; i < 1000 && got == -EAGAIN; ++i) {
      got = receiver->receive(&part, 1);
      if (got == -EAGAIN) pause_ms(1);
    }
    EXPECT_EQ(got, -EBADMSG);
    EXPECT_THAT(receiver->problem(), HasSubstr(text("claims %u bytes", length)));
  }
}

TEST(Sealed, keys_belong_to_one_secret_one_connection_one_purpose_and_one_direction) {
  Seal here = keys(true), there = keys(false);
  EXPECT_EQ(here.send, there.receive);
  EXPECT_EQ(here.receive, there.send);
  EXPECT_NE(here.send, here.receive);
  std::vector<Blob> good = overhear(kWords);
  EXPECT_EQ(hear(good, keys(false, "another secret of the test")).outcome, -EBADMSG);
  EXPECT_EQ(hear(good, keys(false, "a secret of the test", "fresh")).outcome, -EBADMSG);
  EXPECT_EQ(hear(good, keys(false, "a secret of the test", "nonce", "control")).outcome, -EBADMSG);
  EXPECT_EQ(hear(good, keys(true)).outcome, -EBADMSG) << "sent back to its maker";
}

// The key changes every 2^20 records, on both sides after the same one.
TEST(Sealed, goes_on_with_the_next_key) {
  Seal here = keys(true), there = keys(false);
  here.sent = there.received = (1u << 20) - 2;
  auto [one, two] = tcp_pair();
  auto from = seal(adopt(std::move(one)), here);
  auto to = seal(adopt(std::move(two)), there);
  std::string got;
  for (int i = 0; i < 6; ++i) {
    char byte = static_cast<char>('a' + i);
    iovec part{&byte, 1};
    ASSERT_EQ(from->send(&part, 1), 1);
    EXPECT_EQ(from->hand_over()->send == here.send, i == 0) << "another after the second";
  }
  for (int i = 0; i < 1000 && got.size() < 6; ++i) {
    char place[6];
    iovec part{place, sizeof place};
    ssize_t here_now = to->receive(&part, 1);
    if (here_now > 0)
      got.append(place, static_cast<size_t>(here_now));
    else
      pause_ms(1);
  }
  EXPECT_EQ(got, "abcdef");
}

TEST(Sealed, can_be_continued_by_another_with_the_descriptor_and_the_seal) {
  auto [one, two] = tcp_pair();
  auto from = seal(adopt(std::move(one)), keys(true));
  Fd same(::dup(two.get()));
  auto to = seal(adopt(std::move(two)), keys(false));
  auto pass = [&](std::string words) {
    iovec part{words.data(), words.size()};
    EXPECT_EQ(from->send(&part, 1), static_cast<ssize_t>(words.size()));
    std::string got(words.size(), ' ');
    iovec place{got.data(), got.size()};
    ssize_t count = -EAGAIN;
    for (int i = 0; i < 1000 && count == -EAGAIN; ++i) {
      count = to->receive(&place, 1);
      if (count == -EAGAIN) pause_ms(1);
    }
    EXPECT_EQ(got, words);
  };
  pass("before");
  auto state = to->hand_over();
  ASSERT_TRUE(state);
  to = seal(adopt(std::move(same)), *state);
  pass("and after");
  EXPECT_FALSE(adopt(Fd(::dup(from->fd())))->hand_over());
}

// The kernel's socket is empty, and bytes wait inside: the reactor must say so.
TEST(Sealed, bytes_that_wait_inside_are_announced) {
  Pair pair;
  auto world = new_reactor();
  struct Sip final : Reactor::Handler {
    explicit Sip(Socket& socket) : socket_(socket) {}
    void on_events(uint32_t) override {
      char byte;
      iovec part{&byte, 1};
      if (socket_.receive(&part, 1) == 1) got += byte;
    }
    Socket& socket_;
    std::string got;
  } sip(*pair.two);
  ASSERT_TRUE(world->add(*pair.two, EPOLLIN, &sip));
  std::string words(300, 'x');
  iovec part{words.data(), words.size()};
  ASSERT_EQ(pair.one->send(&part, 1), 300);
  ASSERT_TRUE(turn_until(*world, [&] { return sip.got.size() >= 100; }));
  world->modify(*pair.two, 0, &sip);
  for (int i = 0; i < 20; ++i) EXPECT_FALSE(world->run_once(Nanos{0})) << "not asked for";
  EXPECT_EQ(sip.got.size(), 100u);
  world->modify(*pair.two, EPOLLIN, &sip);
  EXPECT_TRUE(turn_until(*world, [&] { return sip.got.size() == 300; }));
  world->remove(*pair.two);
}

}  // namespace
}  // namespace weft::net
