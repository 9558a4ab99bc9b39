#include "weft/schedule.h"

namespace weft::schedule {

Steps::Steps(std::shared_ptr<const Program> program)
    : program_(std::move(program)),
      send_needs_(program_->send_needs_),
      receive_needs_(program_->receive_needs_),
      taken_(program_->receives_.size(), false),
      to_send_(program_->sends_.size()),
      to_receive_(program_->receives_.size()) {}

void Steps::start(std::vector<uint32_t>& sends) const {
  for (uint32_t send = 0; send < send_needs_.size(); ++send)
    if (program_->send_needs_[send] == 0) sends.push_back(send);
}

bool Steps::take(uint32_t receive) {
  WEFT_CHECK(receive < taken_.size() && !taken_[receive]);
  taken_[receive] = true;
  return receive_needs_[receive] == 0;
}

void Steps::applied(uint32_t receive, std::vector<uint32_t>& sends,
                    std::vector<uint32_t>& receives) {
  WEFT_CHECK(receive < taken_.size() && taken_[receive] && to_receive_ > 0);
  --to_receive_;
  auto sends_in_all = static_cast<uint32_t>(send_needs_.size());
  for (uint32_t allowed : program_->allowed_by(receive)) {
    if (allowed < sends_in_all) {
      if (--send_needs_[allowed] == 0) sends.push_back(allowed);
    } else {
      allowed -= sends_in_all;
      if (--receive_needs_[allowed] == 0 && taken_[allowed]) receives.push_back(allowed);
    }
  }
}

void Steps::sent(uint32_t send) {
  WEFT_CHECK(send < send_needs_.size() && to_send_ > 0);
  --to_send_;
}

std::optional<uint32_t> Steps::waits_for() const {
  for (uint32_t receive = 0; receive < taken_.size(); ++receive)
    if (!taken_[receive]) return program_->receives_[receive].peer;
  return std::nullopt;
}

}  // namespace weft::schedule
