// Data-parallel training with an Exchange: gradients are handed over while backward goes on, and
// the next forward waits for each layer's own tensors only. What travels together, in which order
// and over how many lanes, is the plan's business (WEFT_PLAN).
//
//   WEFT_TRACE=run1 weft run -n 3 -- ./training && weft show run1
//
// The model is a chain of linear layers without width, y = w[L-1] * ... * w[0] * x, repeated over
// many independent columns, so that the arithmetic is real and short. Each rank also trains on the
// data of all ranks by itself: both must stay close to each other.
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "weft/api.h"

namespace {

constexpr uint32_t kLayers = 4, kColumns = 5000;
constexpr uint64_t kSteps = 6;
constexpr float kRate = 0.05f;

using Weights = std::vector<std::vector<float>>;  // by layer, by column

Weights first_weights() {
  Weights weights(kLayers, std::vector<float>(kColumns));
  for (uint32_t layer = 0; layer < kLayers; ++layer)
    for (uint32_t c = 0; c < kColumns; ++c)
      weights[layer][c] = 0.8f + 0.001f * static_cast<float>((c * 7 + layer * 13) % 100);
  return weights;
}

// What rank `rank` sees in a step: one input a column, whose target is three times as much.
float input(uint32_t rank, uint64_t step, uint32_t column) {
  return 0.5f + 0.01f * static_cast<float>((rank * 29 + step * 5 + column * 3) % 50);
}

// outputs[l] is what layer l got; outputs[kLayers] is the result.
void forward(const std::vector<float>& weights, uint32_t layer, Weights& outputs) {
  for (uint32_t c = 0; c < kColumns; ++c) outputs[layer + 1][c] = weights[c] * outputs[layer][c];
}

// `error` is the loss by this layer's output, and becomes that by its input.
void backward(const std::vector<float>& weights, const std::vector<float>& inputs,
              std::vector<float>& error, std::vector<float>& gradient) {
  for (uint32_t c = 0; c < kColumns; ++c) {
    gradient[c] = error[c] * inputs[c];
    error[c] *= weights[c];
  }
}

void update(std::vector<float>& weights, const std::vector<float>& sum, uint32_t ranks) {
  for (uint32_t c = 0; c < kColumns; ++c) weights[c] -= kRate * sum[c] / static_cast<float>(ranks);
}

void begin(uint32_t rank, uint64_t step, Weights& outputs) {
  for (uint32_t c = 0; c < kColumns; ++c) outputs[0][c] = input(rank, step, c);
}

std::vector<float> loss_by_output(const Weights& outputs) {
  std::vector<float> error(kColumns);
  for (uint32_t c = 0; c < kColumns; ++c) error[c] = outputs[kLayers][c] - 3 * outputs[0][c];
  return error;
}

// The same training, by one rank with everybody's data and no communication.
Weights train_alone(uint32_t ranks) {
  Weights weights = first_weights();
  Weights outputs(kLayers + 1, std::vector<float>(kColumns));
  for (uint64_t step = 0; step < kSteps; ++step) {
    Weights sums(kLayers, std::vector<float>(kColumns));
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      begin(rank, step, outputs);
      for (uint32_t layer = 0; layer < kLayers; ++layer) forward(weights[layer], layer, outputs);
      std::vector<float> error = loss_by_output(outputs), gradient(kColumns);
      for (uint32_t layer = kLayers; layer-- > 0;) {
        backward(weights[layer], outputs[layer], error, gradient);
        for (uint32_t c = 0; c < kColumns; ++c) sums[layer][c] += gradient[c];
      }
    }
    for (uint32_t layer = 0; layer < kLayers; ++layer) update(weights[layer], sums[layer], ranks);
  }
  return weights;
}

weft::Result<Weights> train(weft::api::Job& job, Weights& gradients) {
  weft::Group& group = job.group();
  // In forward order: the place in this list is the tensor's number.
  std::vector<weft::Tensor> tensors;
  for (uint32_t layer = 0; layer < kLayers; ++layer)
    tensors.push_back({"w" + std::to_string(layer), gradients[layer], layer});
  WEFT_ASSIGN(auto exchange, job.exchange(std::move(tensors)));

  Weights weights = first_weights();
  Weights outputs(kLayers + 1, std::vector<float>(kColumns));
  for (uint64_t step = 0; step <= kSteps; ++step) {
    begin(group.rank().index, step, outputs);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      if (step > 0) {
        // The first layers are needed first; the sums of later ones may still be on their way.
        WEFT_TRY(exchange->wait(layer, step - 1));
        update(weights[layer], gradients[layer], group.ranks());
      }
      forward(weights[layer], layer, outputs);
    }
    if (step == kSteps) break;
    std::vector<float> error = loss_by_output(outputs);
    for (uint32_t layer = kLayers; layer-- > 0;) {
      backward(weights[layer], outputs[layer], error, gradients[layer]);
      WEFT_TRY(exchange->ready(layer, step));  // it travels while backward goes on
    }
  }
  return weights;
}

weft::Result<void> run() {
  // Gradients stand before the job: their memory outlives it.
  Weights gradients(kLayers, std::vector<float>(kColumns));
  WEFT_ASSIGN(auto job, weft::api::join());
  WEFT_ASSIGN(const Weights weights, train(*job, gradients));

  const Weights expected = train_alone(job->group().ranks());
  for (uint32_t layer = 0; layer < kLayers; ++layer)
    for (uint32_t c = 0; c < kColumns; ++c)
      // Sums are taken in another order, so the last bits may differ; nothing else may.
      if (!(std::abs(weights[layer][c] - expected[layer][c]) < 1e-4f))
        return weft::error(weft::Code::corrupt, "layer %u, column %u: %g, not %g", layer, c,
                           double{weights[layer][c]}, double{expected[layer][c]});
  std::printf("rank %u: %llu steps, as if one rank had trained on all data\n",
              job->group().rank().index, static_cast<unsigned long long>(kSteps));
  return job->leave();
}

}  // namespace

int main() {
  if (auto done = run(); !done) {
    std::fprintf(stderr, "training: %s\n", done.error().message().c_str());
    return 1;
  }
  return 0;
}
