// What stands in front of every chunk, and the checksum of its payload.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "weft/lane.h"

namespace weft::lane {
namespace {

using testing::HasSubstr;

// ---- words on the wire -------------------------------------------------------------------

ChunkHeader full_header() {
  ChunkHeader header;
  header.collective = 1;
  header.step = 5;
  header.operation = 0x0000000180000007;
  header.chunk = 99;
  header.elements = uint64_t{3} << 33;
  header.first = uint64_t{1} << 33;
  header.length = 262144;
  header.root = 2;
  header.type = 3;
  header.op = 4;
  header.group = 0x01020304;
  header.message = 0x0000030000000001;
  header.checksum = 0x0123456789abcdef;
  return header;
}

TEST(Wire, a_header_reads_back) {
  std::array<std::byte, kChunkHeaderBytes> bytes;
  ChunkHeader header = full_header();
  encode(header, bytes);
  auto read = decode(bytes);
  ASSERT_TRUE(read);
  EXPECT_EQ(read->collective, header.collective);
  EXPECT_EQ(read->step, header.step);
  EXPECT_EQ(read->operation, header.operation);
  EXPECT_EQ(read->chunk, header.chunk);
  EXPECT_EQ(read->elements, header.elements);
  EXPECT_EQ(read->first, header.first);
  EXPECT_EQ(read->length, header.length);
  EXPECT_EQ(read->root, header.root);
  EXPECT_EQ(read->type, header.type);
  EXPECT_EQ(read->op, header.op);
  EXPECT_EQ(read->group, header.group);
  EXPECT_EQ(read->message, header.message);
  EXPECT_EQ(read->checksum, header.checksum);
}

TEST(Wire, a_header_is_laid_out_as_documented) {
  std::array<std::byte, kChunkHeaderBytes> bytes;
  encode(full_header(), bytes);
  auto at = [&]<typename T>(size_t offset, T) {
    T value;
    std::memcpy(&value, bytes.data() + offset, sizeof value);
    return value;
  };
  EXPECT_EQ(at(0, uint64_t{}), 0x0000000180000007u);
  EXPECT_EQ(at(8, uint8_t{}), 3);
  EXPECT_EQ(at(9, uint8_t{}), 1);
  EXPECT_EQ(at(10, uint16_t{}), 5);
  EXPECT_EQ(at(12, uint32_t{}), 99u);
  EXPECT_EQ(at(16, uint64_t{}), uint64_t{3} << 33);
  EXPECT_EQ(at(24, uint64_t{}), uint64_t{1} << 33);
  EXPECT_EQ(at(32, uint32_t{}), 262144u);
  EXPECT_EQ(at(36, uint16_t{}), 2);
  EXPECT_EQ(at(38, uint8_t{}), 3);
  EXPECT_EQ(at(39, uint8_t{}), 4);
  EXPECT_EQ(at(40, uint64_t{}), 0x0000030000000001u);
  EXPECT_EQ(at(48, uint64_t{}), 0x0123456789abcdefu);
  EXPECT_EQ(at(56, uint32_t{}), 0x01020304u);
}

TEST(Wire, a_header_with_any_one_bit_flipped_is_refused) {
  std::array<std::byte, kChunkHeaderBytes> bytes;
  encode(full_header(), bytes);
  for (size_t bit = 0; bit < 8 * kChunkHeaderBytes; ++bit) {
    auto damaged = bytes;
    damaged[bit / 8] ^= std::byte(1u << (bit % 8));
    EXPECT_FALSE(decode(damaged)) << "bit " << bit;
  }
}

TEST(Wire, a_length_beyond_the_bound_is_refused) {
  std::array<std::byte, kChunkHeaderBytes> bytes;
  ChunkHeader header = full_header();
  header.length = kMaxChunkBytes;
  encode(header, bytes);
  EXPECT_TRUE(decode(bytes));
  for (uint32_t length : {kMaxChunkBytes + 1, 0xffffffffu}) {
    header.length = length;
    encode(header, bytes);
    auto read = decode(bytes);
    ASSERT_FALSE(read);
    EXPECT_EQ(read.error().code(), Code::corrupt);
    EXPECT_THAT(read.error().message(), HasSubstr(text("%u bytes; at most 67108864", length)));
  }
}

TEST(Wire, a_checksum_does_not_depend_on_how_the_bytes_are_cut) {
  std::vector<std::byte> bytes(10007);
  Rng rng(1);
  for (std::byte& b : bytes) b = std::byte(rng.below(256));
  std::span<const std::byte> whole(bytes);
  uint64_t expected = checksum({&whole, 1});
  for (int round = 0; round < 50; ++round) {
    std::vector<std::span<const std::byte>> parts;
    for (size_t from = 0; from < bytes.size();) {
      size_t size = std::min<size_t>(rng.below(3000), bytes.size() - from);
      parts.push_back(whole.subspan(from, size));
      from += size;
    }
    EXPECT_EQ(checksum(parts), expected);
  }
}

}  // namespace
}  // namespace weft::lane
