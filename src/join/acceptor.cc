#include <sys/epoll.h>

#include <algorithm>

#include "handshake.h"
#include "weft/join.h"

namespace weft::join {
namespace {
constexpr size_t kMaxPending = 256;  // a stranger may not make us hold more
constexpr Nanos kPatience = Nanos::from_seconds(5);
}  // namespace

class Acceptor::Pending final : public net::Reactor::Handler {
 public:
  Pending(Acceptor& owner, std::unique_ptr<net::Socket> socket)
      : owner_(owner),
        socket_(std::move(socket)),
        from_(socket_->peer()),
        handshake_(Handshake::Role::acceptor, owner.secret_, Hello{}),
        since_(owner.network_.clock().now()) {}

  void on_events(uint32_t) override {
    auto finished = handshake_.advance(*socket_);
    if (!finished) {
      owner_.finish(this, std::move(finished).error());
      return;
    }
    if (*finished) {
      owner_.finish(this, handshake_.hello());
      return;
    }
    uint32_t wanted = EPOLLIN | (handshake_.wants_write() ? static_cast<uint32_t>(EPOLLOUT) : 0u);
    owner_.reactor_.modify(*socket_, wanted, this);
  }

  Acceptor& owner_;
  std::unique_ptr<net::Socket> socket_;
  std::string from_;
  Handshake handshake_;
  Nanos since_;
};

Acceptor::Acceptor(net::Network& network, net::Reactor& reactor,
                   std::shared_ptr<net::Socket> listener, std::string secret,
                   OnConnection on_connection)
    : network_(network),
      reactor_(reactor),
      listener_(std::move(listener)),
      secret_(std::move(secret)),
      on_connection_(std::move(on_connection)) {
  (void)reactor_.add(*listener_, EPOLLIN, this);
}

Acceptor::~Acceptor() {
  reactor_.remove(*listener_);
  for (auto& pending : pending_) reactor_.remove(*pending->socket_);
}

uint16_t Acceptor::port() const { return listener_->local_port(); }

void Acceptor::on_events(uint32_t) {
  for (;;) {
    auto accepted = listener_->accept();
    if (!accepted || !*accepted) return;
    std::unique_ptr<net::Socket> socket = std::move(*accepted);
    if (pending_.size() >= kMaxPending) {
      ++refused_;
      WEFT_LOG(join, warn, "refused a connection from %s: %zu others are still unproved",
               socket->peer().c_str(), pending_.size());
      continue;
    }
    auto pending = std::make_unique<Pending>(*this, std::move(socket));
    Pending* raw = pending.get();
    (void)reactor_.add(*raw->socket_, EPOLLIN | EPOLLOUT, raw);
    pending_.push_back(std::move(pending));
  }
}

void Acceptor::finish(Pending* pending, Result<Hello> outcome) {
  reactor_.remove(*pending->socket_);
  auto found = std::find_if(pending_.begin(), pending_.end(),
                            [&](const auto& held) { return held.get() == pending; });
  WEFT_CHECK(found != pending_.end());
  std::unique_ptr<net::Socket> socket = std::move(pending->socket_);
  std::string from = pending->from_;
  // The caller is a member function of *pending: it must outlive this call.
  ended_.push_back(std::move(*found));
  pending_.erase(found);
  if (!outcome) {
    ++refused_;
    WEFT_LOG(join, warn, "refused a connection from %s: it %s", from.c_str(),
             outcome.error().message().c_str());
    return;
  }
  if (auto taken = on_connection_(socket, *outcome); !taken) {
    ++refused_;
    WEFT_LOG(join, warn, "refused a connection from %s (rank %u): %s", from.c_str(), outcome->rank,
             taken.error().message().c_str());
  }
}

void Acceptor::tick(Nanos now) {
  ended_.clear();
  for (size_t i = 0; i < pending_.size();) {
    Pending* pending = pending_[i].get();
    if (now - pending->since_ > kPatience)
      finish(pending, error(Code::timeout, "did not prove the secret within %s",
                            format_duration(kPatience).c_str()));
    else
      ++i;
  }
}

}  // namespace weft::join
