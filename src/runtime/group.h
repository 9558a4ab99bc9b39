// The group behind the public face: one progress thread, and what it owns.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>

#include "weft/collective.h"
#include "weft/runtime.h"

namespace weft::runtime {

// Operations that the exchange starts are numbered from 0 by rank 0; those that the program calls
// directly are numbered by each rank in the order of calls, above this.
inline constexpr uint32_t kDirectOperations = 1u << 31;

struct Exchange::Impl {
  struct TensorState {
    uint32_t first_piece = 0;
    uint32_t pieces = 0;       // that hold a part of it
    uint32_t pieces_left = 0;  // in the step under way
    uint64_t steps_done = 0;   // guarded by Group::Impl::mutex
  };

  Group::Impl* group = nullptr;
  std::vector<Tensor> tensors;
  schedule::Layout layout;
  schedule::Readiness readiness;  // guarded by Group::Impl::mutex
  std::vector<TensorState> states;
  std::vector<std::vector<uint32_t>> of_piece;     // tensors that have a part in each piece
  std::unique_ptr<schedule::Admission> admission;  // rank 0 only; progress thread
  struct RunningPiece {
    uint32_t piece;
    uint64_t step;
  };
  std::unordered_map<uint32_t, RunningPiece> running;  // by operation; progress thread
  trace::TrackId track = 0;

  Impl(std::vector<Tensor> registered, schedule::Layout made);
};

struct Group::Impl {
  Impl(const Options& options, capture::Recorder& recorder, transport::Mesh mesh);
  ~Impl();

  bool is_root() const { return options.rank.index == 0; }
  // Runs `operation` and waits for it.
  Result<void> run(collective::Operation operation);
  Result<void> wait_done(uint32_t tensor, uint64_t step);
  void post(std::function<void()> command);
  std::optional<Error> current_failure();

  // ---- progress thread
  void loop();
  void handle_frames();
  void handle(transport::ControlChannel& from, const transport::Frame& frame);
  void bucket_ready(uint32_t bucket, uint64_t step);
  void admit();
  void start(const schedule::Start& start);
  void finished(uint32_t operation);
  void suspect(Rank peer, Error error);
  void fail(Error error, std::optional<Rank> culprit);
  void check_deadlines(Nanos now);
  void send_heartbeats(Nanos now);
  std::string describe(Rank rank) const;

  const Options options;
  capture::Recorder& recorder;
  transport::Mesh mesh;
  std::unique_ptr<collective::Engine> engine;
  trace::TrackId control_track = 0;

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::function<void()>> commands;     // guarded by mutex
  std::optional<Error> failure;                    // guarded by mutex; set once
  std::unordered_map<uint32_t, bool> direct_done;  // guarded by mutex
  uint32_t next_direct = kDirectOperations;        // guarded by mutex
  bool stopping = false;                           // guarded by mutex
  bool left = false;                               // guarded by mutex: all said goodbye
  bool exchange_asked_for = false;                 // guarded by mutex

  // Progress thread only.
  std::shared_ptr<Exchange::Impl> exchange;  // set once, before its first use
  struct Suspicion {
    Rank peer;
    Error error;
    Nanos since;
  };
  std::optional<Suspicion> suspicion;
  std::vector<bool> said_bye;
  bool bye_sent = false;
  bool failed = false;
  std::vector<Nanos> last_heard;  // by rank
  Nanos next_heartbeat{0};
  Nanos next_tcp_info{0};
  Nanos next_check{0};
  std::optional<Nanos> lacking_since;
  std::optional<std::pair<uint32_t, uint64_t>> lacking_what;  // bucket, step
  std::thread thread;
};

}  // namespace weft::runtime
