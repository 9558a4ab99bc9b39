// Trains a little and says too little of it, for the tests of what weft finds out by itself.
//
//   unmarked_sample exchange      gradients, and nothing else
//   unmarked_sample calls         an all-reduce a gradient and a small one a step, and nothing else
//   unmarked_sample compute       gradients and compute, without iterations
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "weft/api.h"

namespace {

constexpr uint32_t kLayers = 3, kElements = 50'000;
constexpr uint64_t kSteps = 8;

void compute(std::vector<float>& data, float value) {
  for (int round = 0; round < 20; ++round)
    for (float& x : data) x = 0.5f * x + value;
}

weft::Result<void> run(const std::string& how) {
  std::vector<std::vector<float>> data(kLayers, std::vector<float>(kElements));
  std::vector<float> loss(1);
  WEFT_ASSIGN(auto job, weft::api::join());
  weft::mark::Marks& marks = job->marks();
  std::unique_ptr<weft::Exchange> exchange;
  if (how != "calls") {
    std::vector<weft::Tensor> tensors;
    for (uint32_t l = 0; l < kLayers; ++l)
      tensors.emplace_back("w" + std::to_string(l), data[l], l);
    WEFT_ASSIGN(exchange, job->exchange(std::move(tensors)));
  }
  const bool says = how == "compute";
  for (uint64_t step = 0; step < kSteps; ++step) {
    for (uint32_t l = 0; l < kLayers; ++l) {
      auto span = says ? marks.forward(l) : weft::mark::Span();
      compute(data[l], 1);
    }
    for (uint32_t l = kLayers; l-- > 0;) {
      {
        auto span = says ? marks.backward(l) : weft::mark::Span();
        compute(data[l], 2);
      }
      if (exchange)
        WEFT_TRY(exchange->ready(l, step));
      else
        WEFT_TRY(job->group().all_reduce(data[l]));
    }
    if (exchange)
      WEFT_TRY(exchange->wait_all(step));
    else
      WEFT_TRY(job->group().all_reduce(loss));
    auto span = says ? marks.update() : weft::mark::Span();
    compute(loss, 0);
  }
  exchange.reset();
  return job->leave();
}

}  // namespace

int main(int count, char** arguments) {
  if (auto done = run(count > 1 ? arguments[1] : "exchange"); !done) {
    std::fprintf(stderr, "unmarked_sample: %s\n", done.error().message().c_str());
    return 1;
  }
  return 0;
}
