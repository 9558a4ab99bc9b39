// From moves of whole ranges to a program: who writes an algorithm says, rank by rank, which range
// goes to whom and what arrives from whom, in an order that is right; the compiler cuts ranges into
// chunks and finds out what must wait for what.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "weft/schedule.h"

namespace weft::schedule {

struct Range {
  uint64_t first = 0;
  uint64_t elements = 0;
};

struct Place {
  Space space = Space::output;
  uint64_t first = 0;
};

// Values have addresses of their own, which stay the same while the value moves from space to
// space: element x of the operation's vector. What nothing has arrived for yet lies in the input,
// at x - input_at; so nothing is copied before it is sent.
class Compiler {
 public:
  explicit Compiler(const OperationShape& shape, uint64_t input_at = 0);

  // Sends the values of a range as they are at this point of the program.
  void send(uint32_t peer, uint32_t step, Range range);
  // Receives a range and puts it at `into`: as it comes, or combined with the value it has here.
  void store(uint32_t peer, uint32_t step, Range range, Place into);
  void combine(uint32_t peer, uint32_t step, Range range, Place into, bool received_first = false);
  // As combine, with the sum kept in fp32 between the first and the last of a range.
  struct Wide {
    bool opens = false;
    bool closes = false;
  };
  void combine_wide(uint32_t peer, uint32_t step, Range range, Place into, Wide wide);
  void copy(Copy copy);
  // The sends of `step` run at most `chunks` chunks ahead of the receives of `behind`, both of
  // which move the same range: chunk k waits for chunk k - chunks.
  void hold_back(uint32_t step, uint32_t behind, uint32_t chunks);
  // Wanted first are the chunks with the lowest number, whichever message they belong to.
  void interleave();
  // The range is a result, to be at `output_first` of the output: what never moved is copied there.
  void result(Range range, uint64_t output_first);

  struct Sizes {
    uint64_t input = 0;
    uint64_t output = 0;
    uint64_t temporary = 0;
    uint64_t wide = 0;
  };
  std::shared_ptr<const Program> finish(Sizes sizes);

 private:
  // Where a stretch of values lies now, and the receive that put it there.
  struct Written {
    uint64_t end = 0;
    uint32_t receive = 0;
    Space space = Space::output;
    uint64_t base = 0;  // value x lies at x - origin + base
    uint64_t origin = 0;
  };
  struct Edge {
    uint32_t receive = 0;
    uint32_t to = 0;
    bool to_receive = false;
  };

  // Where a range lies, and whose receives it waits for (into writers_).
  Place locate(Range range);
  void write(Range range, Place into, uint32_t receive);
  void receive(uint32_t peer, uint32_t step, Range range, Place into, Receive how);
  void add_edges(uint32_t to, bool to_receive);
  template <typename Visit>
  void each_chunk(Range range, Visit&& visit) const;

  std::shared_ptr<Program> program_;
  uint64_t input_at_;
  std::map<uint64_t, Written> written_;  // by first value, not overlapping
  std::vector<uint32_t> writers_;
  std::vector<Edge> edges_;
};

// ---- the algorithms: each says the moves of one rank --------------------------------------

// Block `index` of a shape that has blocks; the sum of those before it.
std::vector<Range> blocks_of(const OperationShape& shape);
// The whole, cut into nearly equal parts as the ring cuts it.
std::vector<Range> parts_of(Range whole, uint32_t parts);

std::shared_ptr<const Program> ring_all_reduce(const OperationShape& shape);
std::shared_ptr<const Program> ring_reduce_scatter(const OperationShape& shape);
std::shared_ptr<const Program> ring_all_gather(const OperationShape& shape);
std::shared_ptr<const Program> chain_broadcast(const OperationShape& shape);
std::shared_ptr<const Program> chain_reduce(const OperationShape& shape);
std::shared_ptr<const Program> hierarchical_all_reduce(const OperationShape& shape);

std::shared_ptr<const Program> halving_doubling_all_reduce(const OperationShape& shape);
std::shared_ptr<const Program> doubling_all_reduce(const OperationShape& shape);

std::shared_ptr<const Program> tree_all_reduce(const OperationShape& shape);
std::shared_ptr<const Program> tree_broadcast(const OperationShape& shape);
std::shared_ptr<const Program> tree_reduce(const OperationShape& shape);

std::shared_ptr<const Program> direct_all_reduce(const OperationShape& shape);
std::shared_ptr<const Program> direct_reduce(const OperationShape& shape);
std::shared_ptr<const Program> direct_reduce_scatter(const OperationShape& shape);
std::shared_ptr<const Program> direct_all_gather(const OperationShape& shape);
std::shared_ptr<const Program> direct_gather(const OperationShape& shape);
std::shared_ptr<const Program> direct_scatter(const OperationShape& shape);
std::shared_ptr<const Program> direct_all_to_all(const OperationShape& shape);
std::shared_ptr<const Program> direct_message(const OperationShape& shape);

}  // namespace weft::schedule
