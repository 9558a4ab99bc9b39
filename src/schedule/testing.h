// All ranks of one operation in one thread: their programs run on real values, and what is on the
// wire is delivered in a random order. Nothing is copied when a chunk is sent: it is read when it
// is delivered, and once more later, as a sender that has to repeat it would. So a program that
// overwrites what is not yet delivered gives a wrong result.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "weft/schedule.h"

namespace weft::schedule::testing {

template <typename T>
struct World {
  std::vector<OperationShape> shapes;
  bool in_place = false;  // where the program allows it
  std::vector<std::vector<T>> inputs;

  std::vector<std::vector<T>> outputs{};
  std::vector<uint64_t> sent_elements{};
  uint64_t spoilt = 0;  // chunks that were other when they were read again before delivery

  void run(uint64_t seed);

 private:
  struct Node {
    std::shared_ptr<const Program> program;
    std::optional<Steps> steps;
    std::vector<T> memory;  // input and output, apart or one in the other
    std::vector<T> temporary;
    std::vector<double> wide;
    uint64_t input_at = 0, output_at = 0;
    std::vector<std::vector<T>> kept{};  // by receive: taken, not yet applied

    T* at(Space space, uint64_t first) {
      if (space == Space::temporary) return temporary.data() + first;
      return memory.data() + (space == Space::input ? input_at : output_at) + first;
    }
  };
  struct Flying {
    uint32_t from, send;
    std::vector<T> as_sent;
  };

  void lay_out(Node& node, uint32_t rank);
  void offer(uint32_t rank, const std::vector<uint32_t>& sends);
  void deliver(const Flying& flying);
  void apply(uint32_t rank, uint32_t receive);
  void combine(Node& node, const Receive& how, const std::vector<T>& received);

  std::vector<Node> nodes_{};
  std::vector<Flying> wire_{};
};

// Where the smaller of input and output lies in the larger one, when they share memory.
inline uint64_t own_block_at(const OperationShape& shape) {
  uint64_t at = 0;
  for (uint32_t r = 0; r < shape.rank; ++r)
    at += shape.counts.empty()
              ? shape.elements / shape.ranks + (r < shape.elements % shape.ranks ? 1 : 0)
              : shape.counts[r];
  return at;
}

template <typename T>
void World<T>::lay_out(Node& node, uint32_t rank) {
  const Program& program = *node.program;
  uint64_t in = program.input_elements(), out = program.output_elements();
  ASSERT_EQ(inputs[rank].size(), in);
  bool shared = in_place && program.in_place() && in > 0 && out > 0;
  if (!shared) node.output_at = in;
  if (shared && in < out) node.input_at = own_block_at(shapes[rank]);
  if (shared && out < in) node.output_at = own_block_at(shapes[rank]);
  node.memory.assign(shared ? std::max(in, out) : in + out, T{-77});
  for (uint64_t i = 0; i < in; ++i) node.memory[node.input_at + i] = inputs[rank][i];
  node.temporary.assign(program.temporary_elements(), T{-99});
  node.wide.assign(program.wide_elements(), -1e9);
  for (const Copy& copy : program.copies())
    for (uint64_t i = 0; i < copy.elements; ++i)
      *node.at(Space::output, copy.to + i) = inputs[rank][copy.from + i];
}

template <typename T>
void World<T>::offer(uint32_t rank, const std::vector<uint32_t>& sends) {
  Node& node = nodes_[rank];
  for (uint32_t index : sends) {
    const Send& send = node.program->sends()[index];
    const T* values = node.at(send.space, send.first);
    wire_.push_back({rank, index, {values, values + send.elements}});
    sent_elements[rank] += send.elements;
  }
}

template <typename T>
void World<T>::combine(Node& node, const Receive& how, const std::vector<T>& received) {
  T* into = node.at(how.space, how.first);
  if (!how.combine) {
    std::copy(received.begin(), received.end(), into);
    return;
  }
  const T* with = node.at(how.with, how.with_first);
  for (uint64_t i = 0; i < how.elements; ++i) {
    if (how.wide) {
      double& sum = node.wide[how.wide_at + i];
      sum =
          (how.wide_opens ? static_cast<double>(with[i]) : sum) + static_cast<double>(received[i]);
      if (how.wide_closes) into[i] = static_cast<T>(sum);
    } else {
      into[i] = how.received_first ? received[i] + with[i] : with[i] + received[i];
    }
  }
}

template <typename T>
void World<T>::apply(uint32_t rank, uint32_t receive) {
  Node& node = nodes_[rank];
  combine(node, node.program->receives()[receive], node.kept[receive]);
  std::vector<uint32_t> sends, receives;
  node.steps->applied(receive, sends, receives);
  offer(rank, sends);
  for (uint32_t next : receives) apply(rank, next);
}

template <typename T>
void World<T>::deliver(const Flying& flying) {
  Node& from = nodes_[flying.from];
  const Send& send = from.program->sends()[flying.send];
  const T* values = from.at(send.space, send.first);
  std::vector<T> now(values, values + send.elements);
  if (now != flying.as_sent) ++spoilt;
  Node& to = nodes_[send.peer];
  auto receive = to.program->find(flying.from, send.id);
  ASSERT_TRUE(receive) << "rank " << send.peer << " does not expect step " << send.id.step
                       << " from " << flying.from;
  const Receive& expected = to.program->receives()[*receive];
  ASSERT_EQ(expected.elements, send.elements);
  ASSERT_EQ(expected.offset, send.offset);
  ASSERT_EQ(expected.peer, flying.from);
  ASSERT_TRUE(to.steps->is_due(*receive)) << "twice";
  to.kept[*receive] = now;
  from.steps->sent(flying.send);
  bool may_apply = to.steps->take(*receive);
  EXPECT_FALSE(to.steps->is_due(*receive));
  if (may_apply) apply(send.peer, *receive);
}

template <typename T>
void World<T>::run(uint64_t seed) {
  Rng rng(seed);
  auto ranks = static_cast<uint32_t>(shapes.size());
  outputs.resize(ranks);
  sent_elements.assign(ranks, 0);
  nodes_.resize(ranks);
  for (uint32_t r = 0; r < ranks; ++r) {
    Node& node = nodes_[r];
    node.program = Program::make(shapes[r]);
    node.steps.emplace(node.program);
    node.kept.resize(node.program->receives().size());
    lay_out(node, r);
  }
  for (uint32_t r = 0; r < ranks; ++r) {
    std::vector<uint32_t> sends;
    nodes_[r].steps->start(sends);
    offer(r, sends);
  }
  while (!wire_.empty()) {
    size_t which = rng.below(wire_.size());
    std::swap(wire_[which], wire_.back());
    Flying flying = std::move(wire_.back());
    wire_.pop_back();
    deliver(flying);
    if (::testing::Test::HasFatalFailure()) return;
  }
  for (uint32_t r = 0; r < ranks; ++r) {
    EXPECT_TRUE(nodes_[r].steps->finished()) << "rank " << r;
    EXPECT_EQ(nodes_[r].steps->waits_for(), std::nullopt);
    T* out = nodes_[r].at(Space::output, 0);
    outputs[r].assign(out, out + nodes_[r].program->output_elements());
  }
  EXPECT_EQ(spoilt, 0u) << "chunks were overwritten before they were delivered";
}

}  // namespace weft::schedule::testing
