#include "model.h"

#include <dirent.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

namespace weft::lab {
namespace {

using Json = nlohmann::json;

// A model file is written by a person; these bounds, which docs/lab.md states, only keep a damaged
// or hostile one harmless.
constexpr Bytes kFileMax = {64 << 20};
constexpr JsonLimits kLimits = {.depth = 8, .values = 1u << 20};
constexpr size_t kLayersMax = 65'534;  // a trace can name no more
constexpr uint64_t kElementsMax = uint64_t{1} << 40;
constexpr double kMicrosMax = 3.6e9;  // an hour
constexpr int kVersion = 1;

// What stands at a place, in few words.
std::string found(const Json& value) {
  return printable(value.dump(-1, ' ', false, Json::error_handler_t::replace), 40);
}

Error wrong(const std::string& path, const Json& value, const char* expected) {
  return error(Code::invalid_argument, "%s: found %s, expected %s", path.c_str(),
               found(value).c_str(), expected);
}

// The object at `path` has exactly the keys `known`.
Result<void> check_keys(const Json& object, const std::string& path,
                        const std::vector<std::string>& known) {
  if (!object.is_object()) return wrong(path, object, "an object");
  for (const auto& [key, value] : object.items()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    const std::optional<std::string> near = nearest(key, known);
    return error(Code::invalid_argument, "%s.%s: found an unknown key%s%s%s", path.c_str(),
                 printable(key, 40).c_str(), near ? ", did you mean '" : "",
                 near ? near->c_str() : "", near ? "'?" : "");
  }
  for (const std::string& key : known)
    if (!object.contains(key))
      return error(Code::invalid_argument, "%s.%s: found nothing, expected this key", path.c_str(),
                   key.c_str());
  return {};
}

Result<std::string> read_text(const Json& object, const std::string& path, const char* key) {
  const Json& value = object.at(key);
  if (!value.is_string() || value.get_ref<const std::string&>().empty() ||
      value.get_ref<const std::string&>().size() > 4096)
    return wrong(path + "." + key, value, "a string of 1 to 4096 bytes");
  return value.get<std::string>();
}

Result<double> read_number(const Json& object, const std::string& path, const char* key, double low,
                           double high, const char* expected) {
  const Json& value = object.at(key);
  if (!value.is_number()) return wrong(path + "." + key, value, expected);
  const double number = value.get<double>();
  if (!(number >= low && number <= high)) return wrong(path + "." + key, value, expected);
  return number;
}

Result<ModelTensor> read_tensor(const Json& json, const std::string& path) {
  WEFT_TRY(check_keys(json, path, {"name", "shape"}));
  ModelTensor tensor;
  WEFT_ASSIGN(tensor.name, read_text(json, path, "name"));
  const Json& shape = json.at("shape");
  constexpr const char* kExpected = "a list of 1 to 8 extents of at least 1, at most 2^40 in all";
  if (!shape.is_array() || shape.empty() || shape.size() > 8)
    return wrong(path + ".shape", shape, kExpected);
  uint64_t elements = 1;
  for (const Json& extent : shape) {
    // A negative number fails as a double before it could become a large unsigned one.
    const bool whole = extent.is_number_integer() && extent.get<double>() >= 1 &&
                       extent.get<double>() <= static_cast<double>(kElementsMax);
    if (!whole || extent.get<uint64_t>() > kElementsMax / elements)
      return wrong(path + ".shape", shape, kExpected);
    tensor.shape.push_back(extent.get<uint64_t>());
    elements *= tensor.shape.back();
  }
  return tensor;
}

Result<ModelLayer> read_layer(const Json& json, const std::string& path) {
  WEFT_TRY(check_keys(json, path, {"name", "forward_us", "backward_us", "tensors"}));
  ModelLayer layer;
  WEFT_ASSIGN(layer.name, read_text(json, path, "name"));
  constexpr const char* kExpected = "microseconds, 0 to an hour";
  WEFT_ASSIGN(const double forward_us,
              read_number(json, path, "forward_us", 0, kMicrosMax, kExpected));
  WEFT_ASSIGN(const double backward_us,
              read_number(json, path, "backward_us", 0, kMicrosMax, kExpected));
  layer.forward = {std::llround(forward_us * 1e3)};
  layer.backward = {std::llround(backward_us * 1e3)};
  const Json& tensors = json.at("tensors");
  if (!tensors.is_array()) return wrong(path + ".tensors", tensors, "a list of tensors");
  for (size_t i = 0; i < tensors.size(); ++i) {
    WEFT_ASSIGN(ModelTensor tensor,
                read_tensor(tensors[i], text("%s.tensors[%zu]", path.c_str(), i)));
    layer.tensors.push_back(std::move(tensor));
  }
  return layer;
}

Result<void> check_whole(const Model& model) {
  std::vector<std::string_view> names;
  uint64_t elements = 0;
  for (const ModelLayer& layer : model.layers) {
    for (const ModelTensor& tensor : layer.tensors) {
      names.push_back(tensor.name);
      elements += tensor.elements();
      if (elements > kElementsMax)
        return error(Code::invalid_argument, "layers: found over 2^40 parameters in all");
    }
  }
  if (names.empty())
    return error(Code::invalid_argument, "layers: found no tensor, expected at least one");
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end())
    return error(Code::invalid_argument, "layers: found two tensors named '%s'",
                 printable(*twice).c_str());
  return {};
}

}  // namespace

uint64_t ModelTensor::elements() const {
  uint64_t product = 1;
  for (const uint64_t extent : shape) product *= extent;
  return product;
}

uint64_t ModelLayer::elements() const {
  uint64_t sum = 0;
  for (const ModelTensor& tensor : tensors) sum += tensor.elements();
  return sum;
}

uint64_t Model::parameters() const {
  uint64_t sum = 0;
  for (const ModelLayer& layer : layers) sum += layer.elements();
  return sum;
}

Nanos Model::forward() const {
  Nanos sum;
  for (const ModelLayer& layer : layers) sum += layer.forward;
  return sum;
}

Nanos Model::backward() const {
  Nanos sum;
  for (const ModelLayer& layer : layers) sum += layer.backward;
  return sum;
}

Nanos Model::update(const ModelLayer& layer) const {
  return Nanos::from_seconds(static_cast<double>(layer.elements() * 4) / update_bytes_per_s);
}

Nanos Model::update() const {
  Nanos sum;
  for (const ModelLayer& layer : layers) sum += update(layer);
  return sum;
}

Nanos Model::compute() const { return forward() + backward() + update(); }

Result<Model> parse_model(std::string_view json) {
  WEFT_TRY(check_json(json, kLimits));
  Json document;
  try {
    document = Json::parse(json);
  } catch (const Json::exception& problem) {
    // The library's own words carry the line and column.
    return error(Code::invalid_argument, "no JSON: %s", printable(problem.what(), 200).c_str());
  }
  if (!document.is_object()) return wrong("$", document, "an object");
  if (!document.contains("weft_model"))
    return error(Code::invalid_argument, "$.weft_model: found nothing, expected %d", kVersion);
  if (document["weft_model"] != kVersion)
    return wrong("$.weft_model", document["weft_model"], "1, the version that this weft reads");
  WEFT_TRY(
      check_keys(document, "$",
                 {"weft_model", "name", "source", "device", "batch", "update_gb_per_s", "layers"}));
  Model model;
  WEFT_ASSIGN(model.name, read_text(document, "$", "name"));
  WEFT_ASSIGN(model.source, read_text(document, "$", "source"));
  WEFT_ASSIGN(model.device, read_text(document, "$", "device"));
  if (!document.at("batch").is_number_integer())
    return wrong("$.batch", document.at("batch"), "a whole number, 1 to 1000000000");
  WEFT_ASSIGN(const double batch,
              read_number(document, "$", "batch", 1, 1e9, "a whole number, 1 to 1000000000"));
  model.batch = static_cast<uint64_t>(batch);
  WEFT_ASSIGN(const double update_gb_per_s,
              read_number(document, "$", "update_gb_per_s", 1e-3, 1e6,
                          "gigabytes of gradients a second, 0.001 to 1000000"));
  model.update_bytes_per_s = update_gb_per_s * 1e9;
  const Json& layers = document.at("layers");
  if (!layers.is_array() || layers.empty() || layers.size() > kLayersMax)
    return wrong("$.layers", layers, "a list of 1 to 65534 layers");
  for (size_t i = 0; i < layers.size(); ++i) {
    WEFT_ASSIGN(ModelLayer layer, read_layer(layers[i], text("$.layers[%zu]", i)));
    model.layers.push_back(std::move(layer));
  }
  if (Result<void> whole = check_whole(model); !whole) return std::move(whole).error().in("$");
  return model;
}

std::vector<std::string> list_models() {
  std::vector<std::string> names;
  const Result<std::string> folder = data_path("lab/models");
  if (!folder) return names;
  DIR* directory = opendir(folder->c_str());
  if (directory == nullptr) return names;
  while (const dirent* entry = readdir(directory)) {
    const std::string_view file = entry->d_name;
    if (file.size() > 5 && file.ends_with(".json"))
      names.emplace_back(file.substr(0, file.size() - 5));
  }
  closedir(directory);
  std::sort(names.begin(), names.end());
  return names;
}

Result<Model> load_model(const std::string& name_or_path) {
  std::string path = name_or_path;
  if (path.find('/') == std::string::npos && !path.ends_with(".json")) {
    const std::vector<std::string> names = list_models();
    if (std::find(names.begin(), names.end(), path) == names.end()) {
      std::string all;
      for (const std::string& name : names) all += (all.empty() ? "" : ", ") + name;
      const std::optional<std::string> near = nearest(path, names);
      return error(Code::not_found,
                   "there is no model '%s'%s%s%s (there are %s; a file is named "
                   "with a '/' or ends in .json)",
                   path.c_str(), near ? ", did you mean '" : "", near ? near->c_str() : "",
                   near ? "'?" : "", all.empty() ? "none" : all.c_str());
    }
    WEFT_ASSIGN(path, data_path("lab/models/" + name_or_path + ".json"));
  }
  WEFT_ASSIGN(const std::string content, read_file(path, kFileMax));
  Result<Model> model = parse_model(content);
  if (!model) return std::move(model).error().in(path);
  return model;
}

}  // namespace weft::lab
