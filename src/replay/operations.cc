#include "simulation.h"

namespace weft::replay {

void Simulator::find_pieces() {
  of_piece_ = schedule::tensors_by_piece(layout_);
  pieces_of_.assign(job_.model->tensors.size(), 0);
  for (const std::vector<uint32_t>& tensors : of_piece_)
    for (uint32_t t : tensors) ++pieces_of_[t];
}

std::shared_ptr<const schedule::Program> Simulator::program_of(uint32_t r, uint32_t operation) {
  uint32_t piece = result_.order[operation];
  shape_.algorithm = algorithms_[piece];
  shape_.elements = layout_.pieces[piece].elements;
  // Parts that differ by an element would not come back as what they left: all are as the
  // largest.
  if (job_.folded() && shape_.algorithm != schedule::Algorithm::doubling)
    shape_.elements = (shape_.elements + job_.ranks - 1) / job_.ranks * job_.ranks;
  shape_.rank = r;
  return programs_.get(shape_);
}

void Simulator::offer(uint32_t r, uint32_t operation) {
  int64_t priority = layout_.buckets[piece_of(operation).bucket].priority;
  const schedule::Program& program = hosts_[r].running[operation].steps->program();
  for (uint32_t send : allowed_) {
    const schedule::Send& what = program.sends()[send];
    connect(r, what.peer);
    hosts_[r].dispatcher.offer(what.peer,
                               {priority, operation, send,
                                static_cast<uint32_t>(what.elements * schedule::kElementBytes)});
  }
  allowed_.clear();
}

void Simulator::take_in(uint32_t r, uint32_t operation, const Early& arriving) {
  Running& running = hosts_[r].running[operation];
  schedule::Steps& steps = *running.steps;
  auto receive = steps.program().find(arriving.from, arriving.id);
  WEFT_CHECK(receive.has_value());
  if (!steps.is_due(*receive)) return;  // it was sent again for nothing
  if (--running.to_receive == 0) hosts_[r].owed.received_all();
  if (!steps.take(*receive)) return;
  due_.assign(1, *receive);
  while (!due_.empty()) {
    uint32_t next = due_.back();
    due_.pop_back();
    const schedule::Receive& how = steps.program().receives()[next];
    if (network_.reduce_ns_per_byte > 0 && how.combine)
      work(hosts_[r], hosts_[r].thread,
           network_.reduce_ns_per_byte *
               static_cast<double>(how.elements * schedule::kElementBytes + cost::kHeaderBytes),
           {});
    steps.applied(next, allowed_, due_);
  }
  offer(r, operation);
  finish_if_done(r, operation);
}

void Simulator::finish_if_done(uint32_t r, uint32_t operation) {
  Host& host = hosts_[r];
  Running& running = host.running[operation];
  if (!running.steps || !running.steps->finished()) return;
  running.steps.reset();
  running.ended = true;
  saw({Seen::What::finishes, r, 0, 0, operation});
  const schedule::Piece& piece = piece_of(operation);
  if (recording_ != nullptr)
    recording_->operation(r, operation, piece, iteration_of_[operation], running.begun, now_);
  for (uint32_t t : of_piece_[result_.order[operation]])
    if (--host.pieces_left[t] == 0) {
      host.pieces_left[t] = pieces_of_[t];
      sum_is_there(r, t, iteration_of_[operation]);
    }
  // Its credit returns when the turn in which it ended is over.
  if (r == 0) push(now_, What::ended, 0, operation);
}

}  // namespace weft::replay
