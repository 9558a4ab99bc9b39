#include "streams.h"

#include <sys/epoll.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "lab.h"

namespace weft::lab {
namespace {

using nlohmann::json;

constexpr uint16_t kPort = 5201;
constexpr Nanos kTurn = Nanos::from_millis(5);
// Between attempts to reach a host whose process is not up yet.
constexpr Nanos kRetry = Nanos::from_millis(50);
constexpr size_t kBlock = 256u << 10;
// The first byte of a connection: who sends what follows.
constexpr std::byte kISend{1}, kYouSend{2};

StreamJob read_stream_job(const std::string& words) {
  json in = json::parse(words);
  StreamJob job;
  job.station = station_from(in.at("station"));
  for (const json& call : in.at("calls"))
    job.calls.push_back({call.at("address"), call.at("flows"), call.at("reverse")});
  job.from = Nanos{in.at("from_ns")};
  job.until = Nanos{in.at("until_ns")};
  return job;
}

class Streams {
 public:
  Streams(const StreamJob& job, net::Network& network, net::Reactor& reactor)
      : job_(job), network_(network), reactor_(reactor), block_(kBlock) {}

  Result<double> run() {
    const std::string own = station_address(job_.station.block, job_.station.host);
    WEFT_ASSIGN(auto door, network_.listen(own, kPort));
    Door callers(*this, std::move(door));
    WEFT_TRY(reactor_.add(callers.socket(), EPOLLIN, &callers));
    for (const StreamJob::Call& call : job_.calls)
      for (uint32_t i = 0; i < call.flows; ++i) WEFT_TRY(open(call));
    while (network_.clock().now() < job_.until && problem_.empty()) {
      for (auto& line : lines_)
        if (line->due(network_.clock().now())) WEFT_TRY(line->dial());
      reactor_.run_once(kTurn);
    }
    reactor_.remove(callers.socket());
    lines_.clear();
    if (!problem_.empty()) return Error(Code::peer_lost, problem_);
    return static_cast<double>(received_) / (job_.until - job_.from).seconds();
  }

 private:
  // One connection. A caller says first who sends.
  class Line final : public net::Reactor::Handler {
   public:
    Line(Streams& all, const StreamJob::Call& call)
        : all_(all), call_(call), first_(call.reverse ? kYouSend : kISend), sends_(!call.reverse) {}
    Line(Streams& all, std::unique_ptr<net::Socket> accepted)
        : all_(all), socket_(std::move(accepted)), said_(true), asks_(true) {}
    ~Line() override { drop(); }

    bool due(Nanos now) const { return !socket_ && now >= next_; }
    // Nobody there yet is no failure: it is tried again.
    Result<void> dial() {
      auto socket = all_.network_.connect(call_.address, kPort);
      if (!socket && socket.error().code() != Code::peer_lost) return std::move(socket).error();
      next_ = all_.network_.clock().now() + kRetry;
      if (!socket) return {};
      socket_ = std::move(*socket);
      return watch(EPOLLOUT);
    }
    Result<void> watch(uint32_t events) { return all_.reactor_.add(*socket_, events, this); }

    void on_events(uint32_t) override {
      if (!said_) {
        if (socket_->connect_outcome() != 0) {
          drop();
          return;
        }
        iovec part{&first_, 1};
        if (socket_->send(&part, 1) != 1) return;
        said_ = true;
        all_.reactor_.modify(*socket_, sends_ ? EPOLLOUT : EPOLLIN, this);
      }
      if (asks_) {
        iovec part{&first_, 1};
        if (socket_->receive(&part, 1) != 1) return;
        asks_ = false;
        sends_ = first_ == kYouSend;
        all_.reactor_.modify(*socket_, sends_ ? EPOLLOUT : EPOLLIN, this);
      }
      iovec part{all_.block_.data(), all_.block_.size()};
      const ssize_t moved = sends_ ? socket_->send(&part, 1) : socket_->receive(&part, 1);
      if (moved > 0 && !sends_) all_.count(static_cast<uint64_t>(moved));
      // Whoever ends first closes; that is early only if it was before the end.
      if (moved == 0 || (moved < 0 && moved != -EAGAIN)) {
        all_.reactor_.remove(*socket_);
        if (all_.network_.clock().now() < all_.job_.until - kTurn - kTurn)
          all_.problem_ = text("a stream with %s broke", socket_->peer().c_str());
      }
    }

   private:
    void drop() {
      if (!socket_) return;
      all_.reactor_.remove(*socket_);
      socket_.reset();
    }

    Streams& all_;
    StreamJob::Call call_;
    std::unique_ptr<net::Socket> socket_;
    std::byte first_{};
    bool said_ = false, asks_ = false, sends_ = false;
    Nanos next_{0};
  };

  class Door final : public net::Reactor::Handler {
   public:
    Door(Streams& all, std::unique_ptr<net::Socket> socket)
        : all_(all), socket_(std::move(socket)) {}
    net::Socket& socket() { return *socket_; }
    void on_events(uint32_t) override {
      auto caller = socket_->accept();
      if (!caller) all_.problem_ = caller.error().message();
      if (!caller || !*caller) return;
      all_.lines_.push_back(std::make_unique<Line>(all_, std::move(*caller)));
      if (auto watched = all_.lines_.back()->watch(EPOLLIN); !watched)
        all_.problem_ = watched.error().message();
    }

   private:
    Streams& all_;
    std::unique_ptr<net::Socket> socket_;
  };

  Result<void> open(const StreamJob::Call& call) {
    lines_.push_back(std::make_unique<Line>(*this, call));
    return lines_.back()->dial();
  }

  void count(uint64_t bytes) {
    const Nanos now = network_.clock().now();
    if (now >= job_.from && now < job_.until) received_ += bytes;
  }

  const StreamJob& job_;
  net::Network& network_;
  net::Reactor& reactor_;
  std::vector<std::byte> block_;
  std::vector<std::unique_ptr<Line>> lines_;
  uint64_t received_ = 0;
  std::string problem_;
};

Result<double> run_streams(const StreamJob& job) {
  const std::unique_ptr<net::Network> network = network_at(job.station);
  WEFT_ASSIGN(auto reactor, network->reactor());
  return Streams(job, *network, *reactor).run();
}

}  // namespace

std::string write_stream_job(const StreamJob& job) {
  json out = {{"station", to_json(job.station)},
              {"calls", json::array()},
              {"from_ns", job.from.count},
              {"until_ns", job.until.count}};
  for (const StreamJob::Call& call : job.calls)
    out["calls"].push_back(
        {{"address", call.address}, {"flows", call.flows}, {"reverse", call.reverse}});
  return out.dump();
}

Result<double> read_stream_result(const std::string& said) {
  const json in = json::parse(said, nullptr, false);
  if (!in.is_object() || !in.contains("received_bytes_per_s"))
    return error(Code::corrupt, "a stream's process said \"%s\"", said.substr(0, 200).c_str());
  return in["received_bytes_per_s"].get<double>();
}

int stream(const std::string& job) {
  try {
    auto rate = run_streams(read_stream_job(job));
    if (!rate) {
      std::fprintf(stderr, "%s\n", rate.error().message().c_str());
      return 3;
    }
    std::printf("%s\n", json{{"received_bytes_per_s", *rate}}.dump().c_str());
    return 0;
  } catch (const json::exception& failure) {
    std::fprintf(stderr, "not a job of streams: %s\n", failure.what());
    return 1;
  }
}

}  // namespace weft::lab
