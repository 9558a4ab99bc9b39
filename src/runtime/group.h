// The group behind the public face: who drives it, and what the driver owns.
//
// One thread at a time drives: it turns the reactor and everything behind it. That is the progress
// thread, unless a caller that waits for its own operation takes the seat. The progress thread
// then stays away for a moment, because more callers will come.
#pragma once

#include <atomic>
#include <condition_variable>
#include <list>
#include <mutex>
#include <new>
#include <thread>
#include <tuple>

#include "weft/collective.h"
#include "weft/runtime.h"

namespace weft::runtime {

// The lanes that a plan asks for, with sizes as the lab has them.
collective::LaneSettings lanes_of(const plan::Plan& sized);

// For one who has no memory for better words: these fit into a string itself.
inline constexpr const char* kNoMemory = "no memory left";

struct Work::State {
  Group::Impl* group = nullptr;
  uint32_t operation = trace::kNone;  // as the trace numbers it
  std::atomic<bool> done{false};
  uint32_t source = kAnyRank;                                // of a message; known when it is done
  std::vector<std::function<void(Result<void>)>> callbacks;  // guarded by Group::Impl::mutex
};

struct Exchange::Impl {
  struct TensorState {
    uint32_t first_piece = 0;
    uint32_t pieces = 0;       // that hold a part of it
    uint32_t pieces_left = 0;  // in the step under way
    std::atomic<uint64_t> steps_done{0};
  };

  // What follows from a plan. Replaced as a whole, by the driver and with the mutex held: the
  // driver reads it as it is, others with the mutex held.
  struct Course {
    plan::Plan plan;
    schedule::Layout layout;
    schedule::Readiness readiness;                   // guarded by Group::Impl::mutex
    std::vector<std::vector<uint32_t>> of_piece;     // tensors that have a part in each piece
    std::vector<Algorithm> algorithm_of;             // by piece
    uint64_t chunk_bytes = 0;                        // of its operations
    std::unique_ptr<schedule::Admission> admission;  // rank 0 only; driver
    std::unique_ptr<schedule::Reports> reports;      // the others only; driver

    // Fails where the plan does not fit the tensors, or cannot be carried out.
    static Result<std::unique_ptr<Course>> make(Group::Impl& group, const plan::Plan& plan,
                                                const std::vector<Tensor>& tensors,
                                                const schedule::Beginning& from);
    Course(plan::Plan its_plan, schedule::Layout its_layout, uint64_t first_step);
  };

  Group::Impl* group = nullptr;
  std::vector<Tensor> tensors;
  std::vector<TensorState> states;
  std::unique_ptr<Course> course;
  bool changing = false;  // guarded by Group::Impl::mutex: a plan, so no gradient is taken
  uint64_t told = 0;      // the others: operations to start; driver
  struct RunningPiece {
    uint32_t piece;
    uint64_t step;
  };
  std::unordered_map<uint64_t, RunningPiece> running;  // by operation; driver
  // Who waits for what, since when.
  struct Waiter {
    uint32_t tensor;
    uint64_t step;
    Nanos since;
  };
  std::list<Waiter> waiters;  // guarded by Group::Impl::mutex

  Impl(Group::Impl& its_group, std::vector<Tensor> registered, std::unique_ptr<Course> first);
  // Puts the state of the tensors in order for the pieces of a course: nothing is in flight.
  void take(std::unique_ptr<Course> next);
  Result<void> ready(uint32_t tensor, uint64_t step, bool has_gradient);
  Result<void> clear(uint32_t tensor, uint64_t step);
  Result<void> wait(uint32_t tensor, uint64_t step);
  Result<void> wait_unrecorded(uint32_t tensor, uint64_t step);

  // change.cc
  struct Proposal;
  Result<void> change_plan(Result<plan::Plan> plan);
  Proposal propose(Result<plan::Plan> plan);
  Result<uint64_t> step_between() const;
  Result<void> agree(const Proposal& own);
  Result<void> run(const Call& call);
};

struct Group::Impl : std::enable_shared_from_this<Group::Impl> {
  Impl(const Options& options, uint32_t epoch, capture::Recorder& recorder, join::Mesh mesh);
  ~Impl();
  // Joins as the options say; `survivors`: with those that are left of an old group. That group may
  // have failed already, when one of them was lost at once.
  static Result<std::shared_ptr<Impl>> join(const Options& options, capture::Recorder& recorder,
                                            uint32_t epoch,
                                            const join::ReunionOptions* survivors = nullptr);
  // The group of those that are left of this one.
  Result<std::shared_ptr<Impl>> rebuilt(Nanos settle, uint32_t least);
  Result<void> meet_neighbours();
  Result<void> agree_on_costs();
  // Which all-reduce for which size, among so many ranks on so many hosts, over so many lanes.
  const schedule::Choice& choice_among(uint32_t ranks, uint32_t hosts, uint32_t lanes);
  uint32_t hosts_of(const collective::Members& members) const;
  Result<void> begin();  // the progress thread

  bool is_root() const { return mesh.rank.index == 0; }
  std::optional<Error> current_failure();
  // A copy; where there is no memory for one, short words that need none.
  static Error copy_of(const Error& error) noexcept;
  // A call that only this rank makes: memory that runs out in it is its error, and nothing else.
  template <typename F>
  auto alone(F&& call) const -> decltype(call()) {
    try {
      return call();
    } catch (const std::bad_alloc&) {
      return copy_of(no_memory);
    }
  }
  // One that all ranks make: the others would wait for what cannot come, so it is the group's end
  // too, and returns when that is so.
  template <typename F>
  auto together(F&& call) -> decltype(call()) {
    try {
      return call();
    } catch (const std::bad_alloc&) {
      return end_without_memory();
    }
  }
  Error end_without_memory() noexcept;
  Nanos now() const { return mesh.network->clock().now(); }
  Nanos ran() const { return now() - suspended; }  // without the time in which it did not run

  // ---- callers (drive.cc)
  // Starts an operation under the next number of its group.
  Result<std::shared_ptr<Work::State>> launch(collective::Operation operation);
  // The next number of its group; of a message, of its pair, direction and tag. With the mutex
  // held.
  void number(collective::Operation& operation);
  Result<std::shared_ptr<Work::State>> prepare(const Call& call, const collective::Members& members,
                                               uint32_t id, uint32_t rank, uint32_t ranks);
  // Returns when `done` holds or the group has failed, moving things along meanwhile.
  // `done` is asked with and without the mutex held: it may take no lock.
  void drive_until(const std::function<bool()>& done);
  void record_wait(Nanos begin, uint32_t operation);  // of the calling thread, until now
  void post(std::function<void()> command);
  void once();  // one turn, if nobody else is driving
  // The right to turn. Whoever has it is known, because a callback may call back.
  class Seat {
   public:
    Seat() = default;
    Seat(Impl& impl, std::unique_lock<std::mutex> lock);
    Seat(Seat&& other) noexcept
        : impl_(std::exchange(other.impl_, nullptr)), lock_(std::move(other.lock_)) {}
    Seat& operator=(Seat&&) = delete;
    ~Seat() { leave(); }
    void leave();
    explicit operator bool() const { return impl_ != nullptr; }

   private:
    Impl* impl_ = nullptr;
    std::unique_lock<std::mutex> lock_;
  };
  Seat take_seat();
  Seat try_seat();
  bool driven_by_this_thread() const { return driver.load() == std::this_thread::get_id(); }
  // Whether this thread may wait for the group at all.
  Result<void> may_wait() const;
  // Whether this is the process that joined.
  bool in_same_process() const { return net::times_forked() == forks; }
  Result<void> same_process() const;
  void want_progress_thread();  // the progress thread is wanted

  // ---- the driver (group.cc)
  bool turn(Nanos timeout);  // whether anything came
  bool turn_once(Nanos timeout);
  void loop();
  void handle_frames();
  void handle(join::ControlChannel& from, const join::Frame& frame);
  void makes_no_sense(Rank peer, join::Control type);
  void record_control(trace::NameId name, uint32_t bucket, uint64_t step, Rank peer);
  void start(const schedule::Start& start);
  void finished(const collective::Key& key);
  void finished_piece(uint64_t operation);
  // Starts it, or ends the group with the reason why this rank cannot.
  void start(collective::Operation operation);

  // ---- messages from any rank (messages.cc)
  Result<std::shared_ptr<Work::State>> receive_any(collective::Operation operation);
  void match_any();
  void check_any(Nanos now);

  // ---- who has which bucket, and what starts next (agreement.cc)
  struct Branch {
    std::unique_ptr<join::ControlChannel> channel;
    bool used = false;  // its opener has said that it is the one
    Nanos heard;
  };
  Result<void> open_branches();
  bool is_branch(uint32_t peer) const;  // between that rank and this one
  void branched(Rank peer, std::unique_ptr<net::Socket> socket);
  void misplaced(Rank peer);
  void handle_branches();
  void handle_branch(Rank peer, Branch& branch, const join::Frame& frame);
  void tend_branches();
  void check_branches(Nanos now);
  join::ControlChannel* channel_to(uint32_t peer);  // above this rank or right below it
  void tell(uint32_t peer, join::Control type, const Packer& words);
  void bucket_ready(uint32_t bucket, uint64_t step);
  Result<void> has_ready(Rank rank, uint32_t bucket, uint64_t step);
  void hear_ready(Rank peer, const join::Frame& frame);
  void admit();
  void hand_down(const Packer& words);
  void hear_starts(Rank peer, const join::Frame& frame);
  void check_owed(Nanos now);
  void find_owing(Rank missing, uint32_t bucket, uint64_t step, Nanos waited);
  void hear_owed(Rank peer, const join::Frame& frame);

  // ---- failure and membership (failure.cc)
  void suspect(Rank peer, Error error);
  // A reason to end the group. Rank 0 decides which reason is the first, for all: others ask it,
  // and wait for its word a moment.
  void fail(const Error& error, std::optional<Rank> culprit);
  void declare(Error error, std::optional<Rank> culprit);
  void end_works(std::optional<Error>& reason, std::optional<Rank> culprit);
  void await_verdict(Nanos now);
  void ran_out_of_memory() noexcept;
  void forgive_suspension(Nanos now);
  void check_waiters(Nanos now);
  void check_deadlines(Nanos now);
  void send_heartbeats(Nanos now);
  std::string describe(Rank rank) const;
  Result<void> leave();
  void say_goodbye();
  void linger();  // does not close before its last words were read

  // ---- status.cc
  void asked(std::unique_ptr<net::Socket> socket);
  void serve_status(Nanos now);
  std::string status();
  std::string names_of_this_rank() const;
  std::string status_of_this_rank();
  void tell_status();  // to those who wait in Group::status()

  Options options;
  uint32_t epoch = 0;  // how often the group was rebuilt
  uint64_t forks = 0;  // net::times_forked() when it was made
  Nanos began;
  capture::Recorder& recorder;
  join::Mesh mesh;
  std::unique_ptr<collective::Engine> engine;
  std::optional<cost::Costs> costs;  // the same on all ranks, once they have met
  std::map<std::tuple<uint32_t, uint32_t, uint32_t>, schedule::Choice> choices;  // guarded by mutex
  std::vector<uint32_t> host_of;                                                 // by rank
  uint32_t all_hosts = 1;
  trace::TrackId control_track = 0;
  trace::NameId says_ready = trace::kNone, hears_ready = trace::kNone, hears_start = trace::kNone;

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::function<void()>> commands;  // guarded by mutex
  std::optional<Error> failure;                 // guarded by mutex; set once
  std::optional<Rank> culprit;                  // guarded by mutex
  std::atomic<bool> has_failed{false};
  std::atomic<bool> has_commands{false};
  std::unordered_map<uint32_t, uint64_t> next_number;  // by group; guarded by mutex
  // Of messages, by group, pair, direction and tag; guarded by mutex.
  std::unordered_map<collective::Key, uint32_t, collective::KeyHash> next_message;
  std::map<std::vector<uint32_t>, uint32_t> subgroups;  // made so far; guarded by mutex
  std::unordered_map<collective::Key, std::shared_ptr<Work::State>, collective::KeyHash>
      works;                         // guarded by mutex
  bool stopping = false;             // guarded by mutex
  std::atomic<bool> left{false};     // all said goodbye
  std::atomic<bool> ran_out{false};  // memory, in a thread that does not drive
  bool exchange_asked_for = false;   // guarded by mutex
  std::atomic<bool> status_wanted{false};
  uint64_t status_asked = 0, status_told = 0;  // how often; guarded by mutex
  std::string status_words;                    // the last; guarded by mutex

  // The seat. Whoever holds it may turn.
  std::mutex seat;
  std::atomic<std::thread::id> driver;
  std::atomic<int> callers{0};      // that drive or want to
  std::atomic<bool> parked{false};  // the progress thread stays away
  std::atomic<int64_t> last_call{0};
  std::condition_variable unpark;  // with mutex

  // Driver only.
  struct AnyReceive {
    collective::Operation operation;  // whose root is not known yet
    collective::Key key;              // of its handle, until it is
    Nanos since;
  };
  std::list<AnyReceive> any_receives;
  std::shared_ptr<Exchange::Impl> exchange;  // set once, before its first use
  struct Suspicion {
    Rank peer;
    Error error;
    Nanos since;
  };
  std::optional<Suspicion> suspicion;
  std::vector<bool> said_bye;
  std::optional<Nanos> first_bye;  // rank 0: of anyone
  std::vector<bool> last_words;    // by rank: it has said why the group ends, or that it knows
  bool failed = false;
  struct Accusation {
    Error error;
    std::optional<Rank> culprit;
    Nanos since;
  };
  std::optional<Accusation> accusation;  // what rank 0 is to decide on
  // Made while there is memory: what is said when there is none, here and to others.
  const Error no_memory;
  Error last_reason;
  Packer last_message;
  Nanos last_turn;
  Nanos suspended{0};                          // altogether
  std::shared_ptr<net::Socket> listener;       // kept for the group that is made of what is left
  std::vector<Nanos> last_heard;               // by rank
  schedule::Tree tree;                         // the same on all ranks, once they have met
  std::map<uint32_t, Branch> branches;         // by rank
  uint64_t frames_heard = 0, frames_told = 0;  // of agreement
  // Rank 0: what each rank is waiting for, as its last heartbeat told.
  struct Waiting {
    bool stuck = false;  // an operation is in flight, and did not move for its deadline
    collective::Key operation{trace::kNone, 0, 0};  // none
    uint32_t waits_for = trace::kNone;
    std::string signature;  // of the operation; empty where it differs by rank
    uint64_t chunks_done = 0;
  };
  std::vector<Waiting> waiting;  // by rank
  Waiting own_waiting(Nanos now) const;
  void compare_calls(Rank peer, Nanos now);
  void blame(Nanos now);
  Nanos next_heartbeat{0};
  Nanos next_tcp_info{0};
  Nanos next_check{0};
  std::optional<Nanos> lacking_since;
  Nanos ask_owed_at{0};
  std::optional<Nanos> leaving_since;
  std::optional<std::pair<uint32_t, uint64_t>> lacking_what;  // bucket, step
  struct Inquiry {
    std::unique_ptr<join::ControlChannel> channel;
    Nanos since;
    bool asked = false;
    bool answered = false;
    std::map<uint32_t, std::string> answers;
  };
  std::vector<Inquiry> inquiries;
  std::thread thread;
};

}  // namespace weft::runtime
