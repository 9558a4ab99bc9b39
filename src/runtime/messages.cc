// Messages that are received from whichever rank sends one: they wait until the driver sees that
// some rank's next message under their tag has begun to arrive, and are ordinary receives from then
// on.
#include "group.h"

namespace weft::runtime {
namespace {

// No rank has this pair: it stands for those whose rank is not known yet.
constexpr uint32_t kNoPair = 0xffffffff;

}  // namespace

std::optional<Rank> Work::source() const {
  if (!state_ || !state_->done.load(std::memory_order_acquire) || state_->source == kAnyRank)
    return std::nullopt;
  return Rank{state_->source};
}

Result<std::shared_ptr<Work::State>> Group::Impl::receive_any(collective::Operation operation) {
  if (operation.deadline.count == 0) operation.deadline = options.progress_deadline;
  auto state = std::make_shared<Work::State>();
  state->group = this;
  collective::Key key{operation.group, kNoPair, 0};
  auto asked_for = std::make_shared<AnyReceive>(AnyReceive{std::move(operation), key, now()});
  {
    std::lock_guard lock(mutex);
    if (failure) return copy_of(*failure);
    commands.reserve(commands.size() + 1);
    asked_for->key.number = next_message[key]++;
    works[asked_for->key] = state;
    commands.push_back([this, asked_for] {
      any_receives.push_back(std::move(*asked_for));
      match_any();
    });
    has_commands.store(true, std::memory_order_release);
  }
  mesh.reactor->wake();
  return state;
}

void Group::Impl::match_any() {
  for (auto it = any_receives.begin(); it != any_receives.end() && !failed;) {
    collective::Operation& operation = it->operation;
    bool found = false;
    for (uint32_t member = 0; member < operation.shape.ranks && !found; ++member) {
      if (member == operation.shape.rank) continue;
      operation.shape.root = member;
      std::lock_guard lock(mutex);
      collective::Key name = collective::key_of(operation);
      auto next = next_message.find(name);
      collective::Key key = name;
      key.number |= next == next_message.end() ? 0 : next->second;
      if (!engine->came_early(key)) continue;
      found = true;
      number(operation);
      auto handle = works.extract(it->key);
      handle.key() = key;
      handle.mapped()->source = member;
      works.insert(std::move(handle));
    }
    if (!found) {
      operation.shape.root = kAnyRank;
      ++it;
      continue;
    }
    collective::Operation ready = std::move(operation);
    it = any_receives.erase(it);
    start(std::move(ready));
    if (failed) return;
    for (const collective::Key& key : engine->poll(now())) finished(key);
  }
}

void Group::Impl::check_any(Nanos at) {
  for (const AnyReceive& receive : any_receives) {
    if (at - receive.since <= receive.operation.deadline + Nanos::from_seconds(1)) continue;
    fail(error(Code::timeout,
               "%s waits for a message with tag %u from any rank, and no rank sent one within %s",
               describe(mesh.rank).c_str(), static_cast<unsigned>(receive.operation.number >> 32),
               format_duration(at - receive.since).c_str()),
         std::nullopt);
    return;
  }
}

}  // namespace weft::runtime
