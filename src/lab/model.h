// model: what a training job computes and exchanges, as data that a person can read and add to.
//
// A model is its layers in forward order; each has a forward and a backward time and the fp32
// tensors whose gradients its backward produces. Times are those of one device at one batch size;
// `source` says where they come from. The format is in docs/lab.md.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "weft/base.h"

namespace weft::lab {

struct ModelTensor {
  std::string name;
  std::vector<uint64_t> shape;

  uint64_t elements() const;
  Bytes bytes() const { return {elements() * 4}; }
};

struct ModelLayer {
  std::string name;
  Nanos forward;
  Nanos backward;
  std::vector<ModelTensor> tensors;

  uint64_t elements() const;
};

struct Model {
  std::string name;
  std::string source;
  std::string device;
  uint64_t batch = 0;
  // How fast the optimizer's update goes over the gradients, in bytes of them a second.
  double update_bytes_per_s = 0;
  std::vector<ModelLayer> layers;

  uint64_t parameters() const;
  Bytes gradient_bytes() const { return {parameters() * 4}; }
  Nanos forward() const;
  Nanos backward() const;
  // The time to update one layer's parameters.
  Nanos update(const ModelLayer& layer) const;
  Nanos update() const;
  // Forward, backward and update.
  Nanos compute() const;
};

// One of the models that weft brings ("vgg16"), or a file (anything with a '/' or ending in
// ".json"). Errors name the JSON path, what was found, what was expected and a near name.
Result<Model> load_model(const std::string& name_or_path);
Result<Model> parse_model(std::string_view json);

// The names of the models that weft brings, sorted.
std::vector<std::string> list_models();

}  // namespace weft::lab
