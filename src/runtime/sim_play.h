// A scene is played: every rank does its part in one thread, and says how it went.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <new>
#include <set>

#include "sim_scene.h"

namespace weft::runtime::simulated {

// What a rank has to say of one group: the first, or one that was made of those that were left.
struct Chapter {
  std::vector<uint32_t> members;  // by the ranks of the first group; empty: it did not form
  uint32_t epoch = 0;             // of one that formed: rebuild() may have begun several times
  std::optional<Error> error;
  std::optional<uint32_t> culprit;  // of the first group's ranks
  size_t acts_done = 0;
  Nanos began, ended;
};
// What became of a rank's trace.
struct Recording {
  std::optional<Error> error;  // of the beginning, of the end
  size_t refused = 0;          // requests to its files
  uint64_t dropped = 0;
  bool over = false;  // it was stopped, or never began
  // Of the file that is there afterwards, if one is.
  bool readable = false;
  bool whole = false;
  uint64_t told_dropped = 0;
};
struct Report {
  std::vector<Chapter> chapters;
  Recording recording;
  std::vector<Files::Call> refused_joining;  // requests to its files
  std::string wrong;                         // a result that is not what it must be
  bool quit = false;
  bool joined() const { return !chapters.empty() && !chapters[0].members.empty(); }
  const std::optional<Error>& error() const { return chapters.back().error; }
};

struct Played {
  sim::Outcome outcome;
  std::vector<Report> reports;
  std::vector<std::optional<Nanos>> died;
  std::vector<bool> refused;            // by rank: it did not get something, or memory
  std::vector<bool> refused_file;       // by rank: while joining
  std::vector<std::string> left;        // files, besides traces, that are there afterwards
  std::vector<uint64_t> file_requests;  // by rank
  std::string folder;
  std::vector<uint64_t> allocations;                       // by rank
  std::vector<std::optional<std::pair<Rank, Rank>>> ends;  // by fault: of its connection
  uint64_t course = 0;
  std::string lines;
};

// Small integers that differ by rank, place and call: sums are exact in every type.
inline uint64_t number(uint32_t rank, uint64_t i, size_t call) {
  return (i * 7 + rank * 13 + call * 31) % 97;
}

struct Block {
  uint64_t first, count;
};
inline Block block_of(uint32_t rank, uint32_t ranks, uint64_t count) {
  uint64_t each = count / ranks, more = count % ranks;
  return {rank * each + std::min<uint64_t>(rank, more), each + (rank < more ? 1 : 0)};
}

// A call with its memory, and what must be there when it is done.
class OwnCall {
 public:
  virtual ~OwnCall() = default;
  virtual Result<Work> start(Group& group) = 0;
  virtual std::string wrong() const = 0;
};

template <typename T>
class TypedCall final : public OwnCall {
 public:
  TypedCall(const OneCall& what, uint32_t rank, uint32_t ranks, size_t index)
      : what_(what), rank_(rank), ranks_(ranks), index_(index) {
    Block own = block_of(rank, ranks, what.count);
    bool is_root = rank == what.root;
    Block in{0, what.count};
    out_ = in;
    switch (what.collective) {
      case Collective::reduce_scatter: out_ = own; break;
      case Collective::all_gather: in = own; break;
      case Collective::broadcast: in.count = is_root ? what.count : 0; break;
      case Collective::reduce: out_.count = is_root ? what.count : 0; break;
      case Collective::gather: in = own, out_.count = is_root ? what.count : 0; break;
      case Collective::scatter: in.count = is_root ? what.count : 0, out_ = own; break;
      default: break;
    }
    input_.resize(in.count);
    output_.assign(out_.count, T(-1));
    for (uint64_t i = 0; i < in.count; ++i)
      input_[i] = static_cast<T>(number(rank, in.first + i, index));
    if (what.in_place) output_ = input_;
  }

  Result<Work> start(Group& group) override {
    Call call;
    call.collective = what_.collective;
    call.algorithm = what_.algorithm;
    call.type = what_.type;
    call.count = what_.count;
    call.root = what_.root;
    call.input = what_.in_place ? nullptr : (input_.empty() ? &none_ : input_.data());
    call.output = output_.empty() ? &none_ : output_.data();
    if (what_.collective == Collective::barrier) {
      call = {};
      call.collective = Collective::barrier;
      call.output = &none_;
      call.count = 1;
      call.type = Type::uint8;
    }
    return group.start(call);
  }

  std::string wrong() const override {
    if (what_.collective == Collective::barrier) return {};
    for (uint64_t i = 0; i < output_.size(); ++i)
      if (output_[i] != static_cast<T>(expected(i)))
        return text("%s by %s, element %llu of %llu", schedule::name_of(what_.collective),
                    schedule::name_of(what_.algorithm), static_cast<unsigned long long>(i),
                    static_cast<unsigned long long>(output_.size()));
    return {};
  }

 private:
  uint64_t expected(uint64_t i) const {
    uint64_t at = out_.first + i, sum = 0;
    switch (what_.collective) {
      case Collective::all_reduce:
      case Collective::reduce_scatter:
      case Collective::reduce:
        for (uint32_t r = 0; r < ranks_; ++r) sum += number(r, at, index_);
        return sum;
      case Collective::all_gather:
      case Collective::gather:
        for (uint32_t r = 0; r < ranks_; ++r) {
          Block block = block_of(r, ranks_, what_.count);
          if (at >= block.first && at < block.first + block.count) return number(r, at, index_);
        }
        return 0;
      case Collective::all_to_all: {
        uint64_t each = what_.count / ranks_;
        return number(static_cast<uint32_t>(at / each), rank_ * each + at % each, index_);
      }
      default: return number(what_.root, at, index_);
    }
  }

  OneCall what_;
  uint32_t rank_, ranks_;
  size_t index_;
  Block out_{};
  std::vector<T> input_, output_;
  T none_{};
};

inline std::unique_ptr<OwnCall> make_call(const OneCall& what, uint32_t rank, uint32_t ranks,
                                          size_t index) {
  if (what.type == Type::float32)
    return std::make_unique<TypedCall<float>>(what, rank, ranks, index);
  if (what.type == Type::int32)
    return std::make_unique<TypedCall<int32_t>>(what, rank, ranks, index);
  return std::make_unique<TypedCall<int64_t>>(what, rank, ranks, index);
}

// Where a world has its files.
class Folder {
 public:
  Folder() : path_(std::filesystem::temp_directory_path() / "weft-sim-XXXXXX") {
    WEFT_CHECK(::mkdtemp(path_.data()) != nullptr);
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string meeting() const { return path_ + "/meeting"; }
  std::string trace(uint32_t rank) const { return path_ + "/" + trace::file_name(rank); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// One rank in its world.
class Player {
 public:
  Player(const Scene& scene, sim::World& world, const Folder* folder, uint32_t rank, Report& report)
      : scene_(scene),
        world_(world),
        folder_(folder),
        network_(world.network_of({rank})),
        rank_(rank),
        report_(report),
        rng_(scene.seed * 1000 + rank) {}

  void play() {
    auto recorder = capture::Recorder::off();
    try {
      if (scene_.traced) recorder = start_recording();
      play_chapters(*recorder);
      if (scene_.traced) stop_recording(*recorder);
    } catch (const std::bad_alloc&) {
      report_.wrong = "an exception left weft";
    }
  }

 private:
  // A call into weft, which finds no memory when the scene says so.
  template <typename F>
  auto weft_call(F&& call) {
    sim::Scarce scarce(world_, {rank_});
    return call();
  }

  // ---- the trace: what it asks of its files is told apart from what joining asks

  template <typename F>
  auto recorder_call(F&& call) {
    size_t before = world_.refused_files({rank_}).size();
    auto out = weft_call(std::forward<F>(call));
    report_.recording.refused += world_.refused_files({rank_}).size() - before;
    return out;
  }

  std::unique_ptr<capture::Recorder> start_recording() {
    capture::Options options;
    options.path = folder_->trace(rank_);
    options.environment.rank = rank_;
    options.environment.ranks = scene_.ranks;
    options.clock = &network_.clock();
    options.ring_events = 1u << 10;
    options.background = false;
    options.files = &network_.system().files();
    auto recorder = recorder_call([&] { return capture::Recorder::start(std::move(options)); });
    if (recorder) return *std::move(recorder);
    report_.recording.error = recorder.error();
    report_.recording.over = true;
    return capture::Recorder::off();
  }

  void stop_recording(capture::Recorder& recorder) {
    Recording& recording = report_.recording;
    if (recording.over) return;
    if (auto stopped = recorder_call([&] { return recorder.stop(); }); !stopped)
      recording.error = stopped.error();
    recording.dropped = recorder.dropped();
    recording.over = true;
  }

  void play_chapters(capture::Recorder& recorder) {
    recorder_ = &recorder;
    begin_chapter();
    Options joining = options();
    size_t before = world_.refused_files({rank_}).size();
    auto group = weft_call([&] { return Group::join(joining, recorder); });
    const auto& refused = world_.refused_files({rank_});
    report_.refused_joining.assign(refused.begin() + static_cast<ptrdiff_t>(before), refused.end());
    play_chapter(group, scene_.acts);
    // A new group may fail too, of what else was to happen.
    for (int again = 0; again < 2 && group && report_.error() && !report_.quit; ++again) {
      think(scene_.thinks[rank_]);
      meet_doom(Doom::When::rebuilding);
      begin_chapter();
      auto smaller = weft_call([&] { return (*group)->rebuild(); });
      if (smaller) meet_doom(Doom::When::rebuilt);
      Act sum;
      sum.calls.push_back({Collective::all_reduce, Algorithm::ring, Type::float32, 3000, 0, true});
      play_chapter(smaller, {sum, sum});
      if (!smaller) break;
      weft_call([&] { group = std::move(smaller); });
    }
    if (group) weft_call([&] { group->reset(); });
  }

  Options options() const {
    Options joining;
    joining.rank = {rank_};
    joining.ranks = scene_.ranks;
    joining.rendezvous =
        scene_.by_file ? "file:" + folder_->meeting() : sim::World::address_of({0}) + ":4000";
    joining.secret = "a secret of the test";
    joining.host = text("host%u", rank_ % scene_.hosts);
    joining.plan = scene_.plan;
    joining.probe = false;
    joining.shared_memory = scene_.shares;
    joining.sealed = scene_.sealed;
    joining.spin = scene_.spin;
    joining.fan_out = scene_.fan_out;
    joining.progress_thread = false;
    joining.network = &network_;
    return joining;
  }

  void begin_chapter() {
    report_.chapters.emplace_back();
    report_.chapters.back().began = network_.clock().now();
  }

  void play_chapter(const Result<std::unique_ptr<Group>>& group, const std::vector<Act>& acts) {
    Chapter& chapter = report_.chapters.back();
    if (!group) {
      chapter.error = group.error();
    } else {
      chapter.epoch = (*group)->epoch();
      if (places_.empty())
        for (const join::Member& member : (*group)->members()) places_.push_back(place_of(member));
      for (const join::Member& member : (*group)->members())
        for (uint32_t rank = 0; rank < scene_.ranks; ++rank)
          if (place_of(member) == places_[rank]) chapter.members.push_back(rank);
      if (auto used = use(**group, acts, chapter); !used) chapter.error = used.error();
      if (auto culprit = (*group)->culprit()) chapter.culprit = chapter.members[culprit->index];
    }
    chapter.ended = network_.clock().now();
  }

  // A rank listens in one place for as long as it lives.
  static std::string place_of(const join::Member& member) {
    return text("%s:%u", member.address.c_str(), unsigned{member.port});
  }

  Result<void> use(Group& group, const std::vector<Act>& acts, Chapter& chapter) {
    for (size_t i = 0; i < acts.size(); ++i) {
      WEFT_TRY(run(group, acts[i], i));
      if (report_.quit) return {};
      ++chapter.acts_done;
      // What a trace meets is no business of the group.
      if (recorder_->on()) static_cast<void>(recorder_call([&] { return recorder_->flush(); }));
    }
    if (report_.chapters.size() == 1) meet_doom(Doom::When::leaving);
    return weft_call([&] { return group.leave(); });
  }

  Result<void> run(Group& group, const Act& act, size_t index) {
    bool named =
        std::find(act.members.begin(), act.members.end(), group.rank().index) != act.members.end();
    switch (act.kind) {
      case Act::Kind::call:
      case Act::Kind::together: return run_calls(group, act.calls, index);
      case Act::Kind::subgroup: {
        if (!named) return {};
        WEFT_ASSIGN(auto part, weft_call([&] { return group.subgroup(act.members); }));
        return run_calls(*part, act.calls, index);
      }
      case Act::Kind::pair: return run_pair(group, act, index);
      case Act::Kind::shift: return run_shift(group, act, index);
      case Act::Kind::exchange: return run_exchange(group, act, index);
      case Act::Kind::abort:
        if (std::string reason = "the seed says so"; named) weft_call([&] { group.abort(reason); });
        return {};
      case Act::Kind::quit: report_.quit = named; return {};
    }
    return {};
  }

  Result<void> run_calls(Group& group, const std::vector<OneCall>& calls, size_t index) {
    std::vector<std::unique_ptr<OwnCall>> own;
    std::vector<Work> works;
    for (const OneCall& call : calls) {
      own.push_back(make_call(call, group.rank().index, group.ranks(), index + own.size()));
      WEFT_ASSIGN(Work work, weft_call([&] { return own.back()->start(group); }));
      works.push_back(std::move(work));
    }
    return wait_for(works, own);
  }

  Result<void> wait_for(std::vector<Work>& works,
                        const std::vector<std::unique_ptr<OwnCall>>& own) {
    std::vector<size_t> order(works.size());
    std::iota(order.begin(), order.end(), size_t{0});
    shuffle(rng_, order);
    for (size_t i : order) {
      WEFT_TRY(weft_call([&] { return works[i].wait(); }));
      if (std::string wrong = own[i]->wrong(); !wrong.empty()) report_.wrong = wrong;
    }
    return {};
  }

  Result<Work> message(Group& group, std::vector<int32_t>& data, bool sends, uint32_t other) {
    Call call;
    call.collective = Collective::point_to_point;
    call.input = call.output = data.data();
    if (!sends) call.input = nullptr;
    call.count = data.size();
    call.type = Type::int32;
    call.root = other;
    call.sends = sends;
    return weft_call([&] { return group.start(call); });
  }
  void fill(std::vector<int32_t>& data, uint32_t from, size_t index) const {
    for (uint64_t i = 0; i < data.size(); ++i)
      data[i] = static_cast<int32_t>(number(from, i, index));
  }
  void check(const std::vector<int32_t>& data, uint32_t from, size_t index) {
    for (uint64_t i = 0; i < data.size(); ++i)
      if (data[i] != static_cast<int32_t>(number(from, i, index)))
        report_.wrong = text("element %llu of a message from rank %u",
                             static_cast<unsigned long long>(i), from);
  }

  Result<void> run_pair(Group& group, const Act& act, size_t index) {
    uint32_t from = act.members[0], to = act.members[1], own = group.rank().index;
    if (own != from && own != to) return {};
    std::vector<int32_t> data(act.calls[0].count + 1, -1);
    if (own == from) fill(data, from, index);
    WEFT_ASSIGN(Work work, message(group, data, own == from, own == from ? to : from));
    WEFT_TRY(weft_call([&] { return work.wait(); }));
    if (own == to) check(data, from, index);
    return {};
  }

  Result<void> run_shift(Group& group, const Act& act, size_t index) {
    uint32_t own = group.rank().index, ranks = group.ranks(), before = (own + ranks - 1) % ranks;
    std::vector<int32_t> out(act.calls[0].count + 1), in(act.calls[0].count + 1, -1);
    fill(out, own, index);
    WEFT_ASSIGN(Work sent, message(group, out, true, (own + 1) % ranks));
    WEFT_ASSIGN(Work received, message(group, in, false, before));
    WEFT_TRY(weft_call([&] { return received.wait(); }));
    check(in, before, index);
    return weft_call([&] { return sent.wait(); });
  }

  // Every rank makes its gradients ready in an order of its own, and takes the sums in another; a
  // tensor whose sum was taken is made ready for the next step while others are still awaited.
  Result<void> run_exchange(Group& group, const Act& act, size_t index) {
    std::vector<std::vector<float>> data;
    std::vector<Tensor> tensors;
    for (size_t t = 0; t < act.tensors.size(); ++t) data.emplace_back(act.tensors[t]);
    for (size_t t = 0; t < act.tensors.size(); ++t)
      tensors.push_back({text("tensor %zu", t), data[t], static_cast<uint32_t>(t)});
    if (recorder_->on()) {
      trace::Model model;
      for (const Tensor& tensor : tensors) {
        auto layer = static_cast<uint16_t>(model.layers.size());
        model.layers.push_back({tensor.name});
        model.tensors.push_back({tensor.name, tensor.data.size_bytes(), layer, layer, layer});
      }
      weft_call([&] { recorder_->model(model); });
    }
    WEFT_ASSIGN(auto exchange, weft_call([&] { return group.exchange(std::move(tensors)); }));
    std::vector<uint32_t> order(data.size());
    std::iota(order.begin(), order.end(), 0u);
    auto make_ready = [&](uint32_t t, uint64_t step) {
      for (uint64_t i = 0; i < data[t].size(); ++i)
        data[t][i] = static_cast<float>(number(group.rank().index, i, index + t + step * 3));
      if (rng_.below(4) == 0) think(Nanos::from_micros(static_cast<double>(rng_.below(2000))));
      return weft_call([&] { return exchange->ready(t, step); });
    };
    shuffle(rng_, order);
    for (uint32_t t : order) WEFT_TRY(make_ready(t, 0));
    for (uint64_t step = 0; step < act.steps; ++step) {
      shuffle(rng_, order);
      if (exchange->barrier() == plan::Barrier::all)
        WEFT_TRY(weft_call([&] { return exchange->wait_all(step); }));
      for (uint32_t t : order) {
        WEFT_TRY(weft_call([&] { return exchange->wait(t, step); }));
        for (uint64_t i = 0; i < data[t].size(); ++i) {
          uint64_t sum = 0;
          for (uint32_t r = 0; r < group.ranks(); ++r) sum += number(r, i, index + t + step * 3);
          if (data[t][i] != static_cast<float>(sum))
            report_.wrong =
                text("tensor %u of step %llu, element %llu", t,
                     static_cast<unsigned long long>(step), static_cast<unsigned long long>(i));
        }
        if (step + 1 < act.steps) WEFT_TRY(make_ready(t, step + 1));
      }
    }
    return {};
  }

  void think(Nanos time) {
    if (auto alone = network_.reactor()) (*alone)->run_once(time);
  }
  void meet_doom(Doom::When when) {
    for (const Doom& doom : scene_.dooms)
      if (doom.rank == rank_ && doom.when == when) world_.doom({rank_}, doom.waits, doom.silently);
  }

  const Scene& scene_;
  sim::World& world_;
  const Folder* folder_;
  capture::Recorder* recorder_ = nullptr;
  std::vector<std::string> places_;  // by rank of the first group
  net::Network& network_;
  uint32_t rank_;
  Report& report_;
  Rng rng_;
};

// What is left in the folder when all is over.
inline void look_at_files(const Scene& scene, const Folder& folder, Played& played) {
  played.folder = folder.path();
  for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
    if (entry.path().extension() != ".weft") played.left.push_back(entry.path().string());
  for (uint32_t rank = 0; scene.traced && rank < scene.ranks; ++rank) {
    Recording& recording = played.reports[rank].recording;
    auto read = trace::read_process(folder.trace(rank));
    recording.readable = read.ok();
    if (!read) continue;
    recording.whole = !read->damage.any();
    recording.told_dropped = read->process.dropped;
  }
}

inline Played play(const Scene& scene, bool keep_lines = false) {
  sim::Options options = scene.world;
  options.keep_lines = keep_lines;
  sim::World world(options);
  std::optional<Folder> folder;
  if (scene.by_file || scene.traced) folder.emplace();
  Played played;
  played.reports.resize(scene.ranks);
  std::vector<std::function<void()>> bodies;
  for (uint32_t rank = 0; rank < scene.ranks; ++rank)
    bodies.emplace_back([&, rank] {
      Player(scene, world, folder ? &*folder : nullptr, rank, played.reports[rank]).play();
    });
  played.outcome = world.run(std::move(bodies));
  for (uint32_t rank = 0; rank < scene.ranks; ++rank) {
    played.died.push_back(world.died({rank}));
    const auto& refused = played.reports[rank].refused_joining;
    played.refused.push_back(world.refused({rank}));
    played.refused_file.push_back(!refused.empty());
    played.file_requests.push_back(world.file_requests({rank}));
    played.allocations.push_back(world.allocations({rank}));
  }
  for (const Fault& fault : scene.world.faults)
    played.ends.push_back(world.ends_of(fault.connection));
  if (folder) look_at_files(scene, *folder, played);
  played.course = world.course();
  played.lines = world.lines();
  return played;
}

}  // namespace weft::runtime::simulated
