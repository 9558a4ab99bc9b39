#include "model.h"

#include <gtest/gtest.h>

namespace weft::lab {
namespace {

const char* kSmall = R"({
  "weft_model": 1, "name": "small", "source": "made up", "device": "none", "batch": 4,
  "update_gb_per_s": 100,
  "layers": [
    {"name": "a", "forward_us": 10.5, "backward_us": 20, "tensors": [
      {"name": "a.weight", "shape": [3, 5]}, {"name": "a.bias", "shape": [5]}]},
    {"name": "b", "forward_us": 1, "backward_us": 2, "tensors": []}]})";

std::string with(std::string json, const std::string& from, const std::string& to) {
  const size_t at = json.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return json.replace(at, from.size(), to);
}

TEST(Model, IsReadFromJson) {
  const Result<Model> model = parse_model(kSmall);
  ASSERT_TRUE(model) << model.error().message();
  EXPECT_EQ(model->parameters(), 20u);
  EXPECT_EQ(model->gradient_bytes().count, 80u);
  EXPECT_EQ(model->forward().count, 11'500);
  EXPECT_EQ(model->backward().count, 22'000);
  EXPECT_EQ(model->layers[0].tensors[0].elements(), 15u);
  EXPECT_EQ(model->batch, 4u);
}

TEST(Model, ErrorsSayWhereWhatAndWhatElse) {
  const struct {
    const char* from;
    const char* to;
    const char* said;
  } cases[] = {
      {"\"weft_model\": 1", "\"weft_model\": 2", "$.weft_model: found 2, expected 1"},
      {"\"weft_model\": 1,", "", "$.weft_model: found nothing"},
      {"\"forward_us\": 10.5", "\"foward_us\": 10.5", "did you mean 'forward_us'?"},
      {"\"forward_us\": 10.5", "\"forward_us\": -1", "$.layers[0].forward_us: found -1"},
      {"\"forward_us\": 10.5", "\"forward_us\": \"x\"", "$.layers[0].forward_us: found \"x\""},
      {"[3, 5]", "[3, 0]", "$.layers[0].tensors[0].shape: found [3,0]"},
      {"[3, 5]", "[3, -5]", "$.layers[0].tensors[0].shape"},
      {"[3, 5]", "[3, 1.5]", "$.layers[0].tensors[0].shape"},
      {"[3, 5]", "[4294967296, 4294967296]", "$.layers[0].tensors[0].shape"},
      {"[3, 5]", "[18446744073709551615]", "$.layers[0].tensors[0].shape"},
      {"[3, 5]", "[]", "$.layers[0].tensors[0].shape"},
      {"a.bias", "a.weight", "found two tensors named 'a.weight'"},
      {"\"batch\": 4", "\"batch\": 4.5", "$.batch: found 4.5"},
      {"\"batch\": 4", "\"batch\": 0", "$.batch: found 0"},
      {"\"update_gb_per_s\": 100", "\"update_gb_per_s\": 0", "$.update_gb_per_s: found 0"},
      {"\"made up\"", "\"\"", "$.source: found \"\""},
      {"\"tensors\": []", "\"tensors\": {}", "$.layers[1].tensors: found {}"},
      {"]})", "]", "no JSON"},
  };
  for (const auto& one : cases) {
    // The raw string ends in "]}"; the last case cuts its brace.
    const std::string json = std::string(one.from) == "]})"
                                 ? std::string(kSmall).substr(0, std::string(kSmall).size() - 1)
                                 : with(kSmall, one.from, one.to);
    const Result<Model> model = parse_model(json);
    ASSERT_FALSE(model) << one.to;
    EXPECT_NE(model.error().message().find(one.said), std::string::npos)
        << one.to << ": " << model.error().message();
  }
  EXPECT_FALSE(parse_model(""));
  EXPECT_FALSE(parse_model("[]"));
  EXPECT_FALSE(parse_model(std::string(100'000, '[')));
}

TEST(Model, BracketsInAStringAreText) {
  EXPECT_TRUE(parse_model(with(kSmall, "made up", std::string(1000, '['))));
  // Nor do they close anything: what follows would end the stack of whoever walks it.
  const std::string deep = std::string(200'000, '[') + std::string(200'000, ']');
  const Result<Model> model =
      parse_model(with(kSmall, "\"weft_model\": 1",
                       "\"x\": \"" + std::string(200'000, ']') + "\", \"weft_model\": " + deep));
  ASSERT_FALSE(model);
  EXPECT_NE(model.error().message().find("nested deeper than 8 levels"), std::string::npos)
      << model.error().message();
}

TEST(Model, LimitsAreThoseOfTheDocument) {
  std::string vast = "[0";
  for (int i = 0; i < 1 << 20; ++i) vast += ",0";
  const Result<Model> many =
      parse_model(with(kSmall, "\"tensors\": []", "\"tensors\": " + vast + "]"));
  ASSERT_FALSE(many);
  EXPECT_NE(many.error().message().find("more than 1048576 values"), std::string::npos)
      << many.error().message();
  const auto layers = [](int count) {
    std::string out;
    for (int i = 0; i < count; ++i)
      out += R"({"name":"x","forward_us":1,"backward_us":1,"tensors":[]},)";
    return with(kSmall, "\"layers\": [", "\"layers\": [" + out);
  };
  EXPECT_TRUE(parse_model(layers(65'532)));  // and the two that it has
  const Result<Model> more = parse_model(layers(65'533));
  ASSERT_FALSE(more);
  EXPECT_NE(more.error().message().find("expected a list of 1 to 65534 layers"), std::string::npos)
      << more.error().message();
}

// What is published: torchvision's three, and bert-base-uncased's encoder and pooler.
TEST(Model, ParametersAddUpToThePublishedCounts) {
  const struct {
    const char* name;
    uint64_t parameters;
    size_t tensors;
    double compute_ms;
  } published[] = {{"alexnet", 61'100'840, 16, 42.85},
                   {"vgg16", 138'357'544, 32, 136.24},
                   {"resnet50", 25'557'032, 161, 85.59},
                   {"bert-base", 109'482'240, 199, 270.49}};
  EXPECT_EQ(list_models().size(), std::size(published));
  for (const auto& one : published) {
    const Result<Model> model = load_model(one.name);
    ASSERT_TRUE(model) << model.error().message();
    EXPECT_EQ(model->name, one.name);
    EXPECT_EQ(model->parameters(), one.parameters) << one.name;
    EXPECT_NEAR(model->compute().millis(), one.compute_ms, 0.02) << one.name;
    size_t tensors = 0;
    for (const ModelLayer& layer : model->layers) tensors += layer.tensors.size();
    EXPECT_EQ(tensors, one.tensors) << one.name;
  }
}

TEST(Model, AWrongNameIsAnsweredWithANearOne) {
  const Result<Model> model = load_model("vgg19");
  ASSERT_FALSE(model);
  EXPECT_EQ(model.error().code(), Code::not_found);
  EXPECT_NE(model.error().message().find("did you mean 'vgg16'?"), std::string::npos)
      << model.error().message();
  EXPECT_FALSE(load_model("./no/such/file.json"));
}

}  // namespace
}  // namespace weft::lab
