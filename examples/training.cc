// Data-parallel training with an Exchange: gradients are handed over while backward goes on, and
// the next forward waits for what the plan says: each layer for its own tensors, or for all. What
// travels together, in which order and over how many lanes, is the plan's business (WEFT_PLAN).
//
//   WEFT_TRACE=run1 weft run -n 3 -- ./training && weft diagnose run1
//   weft loop -o loop1 -- weft run -n 2 -- ./training --columns 500000 --steps 12
//
// It says of its own work what the trace cannot know (marks): iterations, data loading, and
// forward, backward and update of each layer. Without WEFT_TRACE that costs nothing.
//
// The model is a chain of linear layers without width, y = w[L-1] * ... * w[0] * x, repeated over
// many independent columns, so that the arithmetic is real and short. Each rank also trains on the
// data of all ranks by itself, on some of the columns: both must stay close to each other.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "weft/api.h"

namespace {

struct Size {
  uint32_t layers = 4, columns = 5000, batch = 2;
  uint64_t steps = 6;
};

constexpr float kRate = 0.05f;
constexpr uint32_t kChecked = 5000;  // columns

using Weights = std::vector<std::vector<float>>;  // by layer, by column

Weights first_weights(const Size& size) {
  Weights weights(size.layers, std::vector<float>(size.columns));
  for (uint32_t layer = 0; layer < size.layers; ++layer)
    for (uint32_t c = 0; c < size.columns; ++c)
      weights[layer][c] = 0.8f + 0.001f * static_cast<float>((c * 7 + layer * 13) % 100);
  return weights;
}

// What a rank sees in a step: `batch` inputs a column, whose targets are three times as much.
void load(const Size& size, uint32_t rank, uint64_t step, std::vector<float>& inputs) {
  for (uint32_t b = 0; b < size.batch; ++b)
    for (uint32_t c = 0; c < size.columns; ++c)
      inputs[size_t{b} * size.columns + c] =
          0.5f + 0.01f * static_cast<float>((rank * 29 + step * 5 + b * 11 + c * 3) % 50);
}

// outputs[l] is what layer l got, for the whole batch; the last is the result.
void forward(const Size& size, const std::vector<float>& weights, uint32_t layer,
             Weights& outputs) {
  for (uint32_t b = 0; b < size.batch; ++b) {
    const float* in = outputs[layer].data() + size_t{b} * size.columns;
    float* out = outputs[layer + 1].data() + size_t{b} * size.columns;
    for (uint32_t c = 0; c < size.columns; ++c) out[c] = weights[c] * in[c];
  }
}

// `error` is the loss by this layer's output, and becomes that by its input.
void backward(const Size& size, const std::vector<float>& weights, const std::vector<float>& inputs,
              std::vector<float>& error, std::vector<float>& gradient) {
  std::fill(gradient.begin(), gradient.end(), 0.0f);
  for (uint32_t b = 0; b < size.batch; ++b) {
    const float* in = inputs.data() + size_t{b} * size.columns;
    float* by = error.data() + size_t{b} * size.columns;
    for (uint32_t c = 0; c < size.columns; ++c) {
      gradient[c] += by[c] * in[c] / static_cast<float>(size.batch);
      by[c] *= weights[c];
    }
  }
}

void update(std::vector<float>& weights, const std::vector<float>& sum, uint32_t ranks) {
  for (size_t c = 0; c < weights.size(); ++c)
    weights[c] -= kRate * sum[c] / static_cast<float>(ranks);
}

void loss_by_output(const Weights& outputs, std::vector<float>& error) {
  for (size_t i = 0; i < error.size(); ++i) error[i] = outputs.back()[i] - 3 * outputs.front()[i];
}

Weights outputs_of(const Size& size) {
  return Weights(size.layers + 1, std::vector<float>(size_t{size.columns} * size.batch));
}

// The same training, by one rank with everybody's data and no communication.
Weights train_alone(const Size& size, uint32_t ranks) {
  Weights weights = first_weights(size);
  Weights outputs = outputs_of(size);
  std::vector<float> error(outputs[0].size()), gradient(size.columns);
  for (uint64_t step = 0; step < size.steps; ++step) {
    Weights sums(size.layers, std::vector<float>(size.columns));
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      load(size, rank, step, outputs[0]);
      for (uint32_t layer = 0; layer < size.layers; ++layer)
        forward(size, weights[layer], layer, outputs);
      loss_by_output(outputs, error);
      for (uint32_t layer = size.layers; layer-- > 0;) {
        backward(size, weights[layer], outputs[layer], error, gradient);
        for (uint32_t c = 0; c < size.columns; ++c) sums[layer][c] += gradient[c];
      }
    }
    for (uint32_t layer = 0; layer < size.layers; ++layer)
      update(weights[layer], sums[layer], ranks);
  }
  return weights;
}

weft::Result<Weights> train(const Size& size, weft::api::Job& job, Weights& gradients) {
  weft::Group& group = job.group();
  weft::mark::Marks& marks = job.marks();
  // In forward order: the place in this list is the tensor's number.
  std::vector<weft::Tensor> tensors;
  for (uint32_t layer = 0; layer < size.layers; ++layer)
    tensors.emplace_back("w" + std::to_string(layer), gradients[layer], layer);
  WEFT_ASSIGN(auto exchange, job.exchange(std::move(tensors)));
  const bool by_tensor = exchange->barrier() == weft::plan::Barrier::tensor;

  Weights weights = first_weights(size);
  Weights outputs = outputs_of(size);
  std::vector<float> error(outputs[0].size());
  auto apply = [&](uint32_t layer) {
    auto span = marks.update(layer);
    update(weights[layer], gradients[layer], group.ranks());
  };
  for (uint64_t step = 0; step <= size.steps; ++step) {
    WEFT_TRY(marks.begin_iteration(step));
    {
      auto span = marks.data_loading();
      load(size, group.rank().index, step, outputs[0]);
    }
    if (step > 0 && !by_tensor) {
      WEFT_TRY(exchange->wait_all(step - 1));
      for (uint32_t layer = 0; layer < size.layers; ++layer) apply(layer);
    }
    for (uint32_t layer = 0; layer < size.layers; ++layer) {
      if (step > 0 && by_tensor) {
        // The first layers are needed first; the sums of later ones may still be on their way.
        WEFT_TRY(exchange->wait(layer, step - 1));
        apply(layer);
      }
      auto span = marks.forward(layer);
      forward(size, weights[layer], layer, outputs);
    }
    if (step == size.steps) break;
    loss_by_output(outputs, error);
    for (uint32_t layer = size.layers; layer-- > 0;) {
      {
        auto span = marks.backward(layer);
        backward(size, weights[layer], outputs[layer], error, gradients[layer]);
      }
      WEFT_TRY(exchange->ready(layer, step));  // it travels while backward goes on
    }
  }
  WEFT_TRY(marks.end_iteration());
  return weights;
}

weft::Result<void> run(const Size& size) {
  // Gradients stand before the job: their memory outlives it.
  Weights gradients(size.layers, std::vector<float>(size.columns));
  WEFT_ASSIGN(auto job, weft::api::join());
  WEFT_ASSIGN(const Weights weights, train(size, *job, gradients));

  Size checked = size;
  checked.columns = std::min(size.columns, kChecked);
  const Weights expected = train_alone(checked, job->group().ranks());
  for (uint32_t layer = 0; layer < size.layers; ++layer)
    for (uint32_t c = 0; c < checked.columns; ++c)
      // Sums are taken in another order, so the last bits may differ; nothing else may.
      if (!(std::abs(weights[layer][c] - expected[layer][c]) < 1e-4f))
        return weft::error(weft::Code::corrupt, "layer %u, column %u: %g, not %g", layer, c,
                           double{weights[layer][c]}, double{expected[layer][c]});
  std::printf("rank %u: %llu steps, as if one rank had trained on all data\n",
              job->group().rank().index, static_cast<unsigned long long>(size.steps));
  return job->leave();
}

// "--columns 500000": false if it is none of these.
bool parse(int count, char** arguments, Size& size) {
  for (int i = 1; i < count; i += 2) {
    const long value = i + 1 < count ? std::strtol(arguments[i + 1], nullptr, 10) : 0;
    if (value < 1 || value > 100'000'000) return false;
    const auto number = static_cast<uint32_t>(value);
    if (std::strcmp(arguments[i], "--columns") == 0)
      size.columns = number;
    else if (std::strcmp(arguments[i], "--layers") == 0 && number <= 1000)
      size.layers = number;
    else if (std::strcmp(arguments[i], "--batch") == 0 && number <= 10'000)
      size.batch = number;
    else if (std::strcmp(arguments[i], "--steps") == 0)
      size.steps = number;
    else
      return false;
  }
  return true;
}

}  // namespace

int main(int count, char** arguments) {
  Size size;
  if (!parse(count, arguments, size)) {
    std::fprintf(stderr, "usage: training [--columns N] [--layers N] [--batch N] [--steps N]\n");
    return 2;
  }
  if (auto done = run(size); !done) {
    std::fprintf(stderr, "training: %s\n", done.error().message().c_str());
    return 1;
  }
  return 0;
}
