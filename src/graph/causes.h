// Which received chunks a sent chunk waited for: what the steps of its operation's algorithm say.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "parts.h"
#include "weft/plan.h"
#include "weft/schedule.h"

namespace weft::graph {

// A program, read backwards.
class Causes {
 public:
  explicit Causes(std::shared_ptr<const schedule::Program> program);

  // The index of a send; nullopt if there is none such.
  std::optional<uint32_t> find(uint32_t peer, schedule::ChunkId id) const;
  // The receives that it waits for.
  std::span<const schedule::Receive* const> of(uint32_t send) const;

 private:
  std::shared_ptr<const schedule::Program> program_;
  std::vector<uint32_t> by_name_;  // sends, by peer, step and chunk
  std::vector<uint32_t> first_;    // by send, one more at the end
  std::vector<const schedule::Receive*> receives_;
};

// Finds the algorithm of each operation: the plan's, or else the one whose messages were recorded.
class Programs {
 public:
  Programs(const std::vector<uint32_t>& host_of, const trace::Environment& environment);

  // Of an operation of so many bytes of which these chunks were sent. Null when no algorithm that
  // is known makes them: whoever asks then assumes a ring.
  const Causes* of(uint32_t rank, uint64_t bytes, std::span<const Half> sends);

 private:
  const Causes* made(uint32_t rank, uint64_t bytes, schedule::Algorithm algorithm);

  schedule::OperationShape shape_;  // of the operation that is asked about
  std::optional<plan::Plan> plan_;  // of the sizes that the job had
  uint64_t work_left_;              // a damaged trace must not make work without end
  // By rank, bytes and algorithm; null: not made.
  std::map<std::tuple<uint32_t, uint64_t, schedule::Algorithm>, std::unique_ptr<Causes>> made_;
  std::unordered_map<uint64_t, schedule::Algorithm> last_;  // by bytes: what fitted
};

}  // namespace weft::graph
