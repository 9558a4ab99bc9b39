// Turns what the simulator does into a Trace like a measured one.
#pragma once

#include <unordered_map>

#include "weft/schedule.h"
#include "weft/trace.h"

namespace weft::replay {

class Recording {
 public:
  Recording(const trace::Environment& like, const trace::Model& model, const plan::Plan& plan,
            const std::vector<uint32_t>& host_of, uint32_t lanes);

  void compute(uint32_t rank, trace::Kind kind, uint32_t layer, uint32_t iteration, int64_t start,
               int64_t end, int64_t cpu_ns);
  void iteration(uint32_t rank, uint32_t iteration, int64_t start, int64_t end);
  void wait(uint32_t rank, uint32_t tensor, uint32_t layer, uint32_t iteration, int64_t start,
            int64_t end);
  void ready(uint32_t rank, uint32_t tensor, uint32_t layer, uint32_t bucket, uint32_t iteration,
             int64_t at);
  void done(uint32_t rank, uint32_t tensor, uint32_t layer, uint32_t iteration, int64_t at);
  void admitted(uint32_t operation, const schedule::Piece& piece, uint32_t iteration, int64_t at);
  void operation(uint32_t rank, uint32_t operation, const schedule::Piece& piece,
                 uint32_t iteration, int64_t start, int64_t end);
  struct Chunk {
    uint32_t operation;
    schedule::ChunkId id;
    uint64_t bytes;
    uint32_t iteration;
    uint64_t message;
  };
  void sent(uint32_t rank, uint32_t to, uint16_t lane, const Chunk& chunk, int64_t start,
            int64_t end);
  void received(uint32_t rank, uint32_t from, uint16_t lane, const Chunk& chunk, int64_t start,
                int64_t end);

  trace::Trace take() &&;

 private:
  trace::Event& add(uint32_t rank, trace::TrackId track, trace::Kind kind, trace::Shape shape,
                    int64_t start, int64_t end);
  void chunk(uint32_t rank, trace::TrackId track, trace::Shape shape, uint16_t lane, uint32_t peer,
             const Chunk& chunk, int64_t start, int64_t end);

  // The first track of the lanes between two ranks; they are made when they are first used.
  trace::TrackId lanes_between(uint32_t rank, uint32_t peer, trace::TrackType type);

  trace::Trace trace_;
  uint32_t ranks_;
  uint32_t lanes_;
  // By rank and peer, for each direction; 0: not yet there.
  std::unordered_map<uint64_t, trace::TrackId> outgoing_, incoming_;
};

}  // namespace weft::replay
