// Whole behaviour of replay and diagnose as text: tests/scenarios/*.txt.
//
// A file has sections: lines that describe a run (world.h), a question as the last of them, "----",
// and the answer up to an empty line. Answers are compared exactly. What a section says of the run
// holds for those after it. Questions:
//
//   replay [plan KEY VALUE …] [set KEY=VALUE …] [what_if NAME …]   what an iteration would take
//   equation ALGORITHM       what docs/cost_model.md says for all gradients in one piece
//   path                     the critical path of the last iteration
//   diagnose                 where the time went, and findings
//
// WEFT_SCENARIOS=update (`make scenarios`) writes the answers instead; the difference is read in
// review.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "weft/diagnose.h"
#include "world.h"

namespace weft::scenarios {
namespace {

constexpr const char* kRule = "----";

Words split(const std::string& line) {
  std::istringstream in(line);
  Words out;
  for (std::string word; in >> word;) out.push_back(word);
  return out;
}

std::string ms(double ns) { return text("%.3f ms", ns * 1e-6); }

// ---- questions -----------------------------------------------------------------------------

Result<void> set_what_if(replay::WhatIf& what_if, const std::string& name) {
  using Wish = bool replay::WhatIf::*;
  static const std::map<std::string, Wish> kWishes = {
      {"free_communication", &replay::WhatIf::free_communication},
      {"no_stragglers", &replay::WhatIf::no_stragglers},
      {"no_flow_cap", &replay::WhatIf::no_flow_cap},
      {"no_overhead", &replay::WhatIf::no_overhead}};
  auto found = kWishes.find(name);
  if (found == kWishes.end())
    return error(Code::invalid_argument, "what_if: what is %s?", name.c_str());
  what_if.*found->second = true;
  return {};
}

Result<replay::Question> question_of(const plan::Plan& recorded, const Words& line) {
  replay::Question out;
  out.interval = false;
  for (size_t i = 1; i < line.size();) {
    const std::string& what = line[i++];
    size_t end = i;
    while (end < line.size() && line[end] != "plan" && line[end] != "set" && line[end] != "what_if")
      ++end;
    std::span<const std::string> rest = std::span(line).subspan(i, end - i);
    if (what == "plan") {
      WEFT_ASSIGN(out.plan, changed(recorded, rest));
    } else if (what == "set") {
      for (const std::string& assignment : rest) WEFT_TRY(replay::set(out.cluster, assignment));
    } else if (what == "what_if") {
      for (const std::string& name : rest) WEFT_TRY(set_what_if(out.what_if, name));
    } else {
      return error(Code::invalid_argument, "replay: what is %s?", what.c_str());
    }
    i = end;
  }
  return out;
}

// Buckets in the order in which the operations of the second half were admitted.
std::string order_of(const replay::Prediction& answer, const plan::Plan& plan,
                     const replay::Replayer& replayer) {
  std::vector<schedule::Tensor> tensors;
  for (const trace::Tensor& tensor : replayer.model().tensors)
    tensors.push_back({tensor.name, tensor.bytes / schedule::kElementBytes, tensor.consumed_by});
  auto layout = schedule::make_layout(plan, tensors);
  if (!layout) return layout.error().message();
  std::string out;
  std::string before;
  size_t times = 0;
  auto flush = [&] {
    if (times > 0) out += " " + before + (times > 1 ? text("*%zu", times) : "");
  };
  for (size_t i = answer.order.size() - layout->pieces.size(); i < answer.order.size(); ++i) {
    std::string name;
    for (uint32_t t : layout->buckets[layout->pieces[answer.order[i]].bucket].tensors)
      name += (name.empty() ? "" : "+") + tensors[t].name;
    if (name != before) {
      flush();
      times = 0;
    }
    before = name;
    ++times;
  }
  flush();
  return out;
}

Result<std::string> answer_replay(const World& world, const Words& line) {
  WEFT_ASSIGN(World::Run run, world.run());
  WEFT_ASSIGN(replay::Question question, question_of(world.plan(), line));
  auto predicted = run.replayer.predict(question);
  if (!predicted) return "refused    " + predicted.error().message() + "\n";
  std::string out = "iteration  " + ms(predicted->iteration_ns) + "\n";
  if (predicted->processor_busy >= 0.005)
    out += text("processor  %.0f %% busy\n", 100 * predicted->processor_busy);
  if (!question.what_if.free_communication)
    out += "order     " + order_of(*predicted, question.plan.value_or(world.plan()), run.replayer) +
           "\n";
  for (const std::string& unknown : predicted->unknown) out += "unknown    " + unknown + "\n";
  for (const std::string& assumed : predicted->assumed) out += "assumed    " + assumed + "\n";
  return out;
}

Result<std::string> answer_equation(const World& world, const Words& line) {
  if (line.size() != 2) return error(Code::invalid_argument, "equation: of which algorithm?");
  auto algorithm = schedule::algorithm_named(line[1]);
  if (!algorithm) return error(Code::invalid_argument, "equation: what is %s?", line[1].c_str());
  auto seconds = schedule::all_reduce_seconds(world.costs(), *algorithm, world.gradient_bytes(),
                                              world.group());
  return (seconds ? "equation   " + ms(1e9 * *seconds) : "equation   unknown") + "\n";
}

// ---- the path ------------------------------------------------------------------------------

std::string subject_of(const graph::Graph& graph, const graph::Stretch& stretch) {
  const graph::Node& node = graph.nodes[stretch.node];
  using graph::NodeType;
  switch (node.type) {
    case NodeType::forward:
    case NodeType::backward:
    case NodeType::update:
      return text("%s %s on rank %u", graph::name_of(node.type),
                  graph.model.layers[node.subject].name.c_str(), node.rank);
    case NodeType::ready:
    case NodeType::done:
    case NodeType::sum: return graph.model.tensors[node.subject].name;
    case NodeType::bucket: return text("bucket %u", node.subject);
    default: break;
  }
  for (const graph::Operation& operation : graph.operations)
    if (operation.number == node.subject) return text("bucket %u", operation.bucket);
  return "";
}

Result<std::string> answer_path(const World& world) {
  WEFT_ASSIGN(World::Run run, world.run());
  graph::Predecessors predecessors(run.graph);
  // The last one but one: after the last there is no forward that it could lead to.
  size_t index = run.graph.iterations.size() - 2;
  std::string out, label;
  int64_t ns = 0;
  auto flush = [&] {
    if (ns > 0) out += text("%10s  %s\n", ms(static_cast<double>(ns)).c_str(), label.c_str());
    ns = 0;
  };
  for (const graph::Stretch& stretch : graph::critical_path(run.graph, predecessors, index)) {
    std::string own =
        text("%-14s %s", graph::name_of(stretch.spent), subject_of(run.graph, stretch).c_str());
    if (own != label) flush();
    label = std::move(own);
    ns += stretch.end_ns - stretch.start_ns;
  }
  flush();
  return out;
}

// ---- the diagnosis -------------------------------------------------------------------------

Result<std::string> answer_diagnose(const World& world) {
  WEFT_ASSIGN(World::Run run, world.run());
  WEFT_ASSIGN(diagnose::Diagnosis diagnosis, diagnose::diagnose(run.graph, run.replayer));
  std::string out = text("iteration  %s, replayed %+.1f %%\n", ms(diagnosis.iteration_ns).c_str(),
                         diagnosis.fidelity_error_percent);
  for (const diagnose::Share& share : diagnosis.path)
    if (share.percent >= 0.05)
      out += text("path       %5.1f %% %s\n", share.percent, share.what.c_str());
  for (const diagnose::Finding& finding : diagnosis.findings)
    out += text("finding    %s, %.1f %% (%.1f to %.1f): %s\n           %s\n", finding.name.c_str(),
                finding.gain_percent, finding.low, finding.high, finding.title.c_str(),
                finding.remedy.c_str());
  if (diagnosis.findings.empty()) out += "finding    none\n";
  std::set<std::string> rejected;
  for (const std::string& one : diagnosis.rejected) rejected.insert(one.substr(0, one.find(':')));
  for (const std::string& name : rejected) out += "rejected   " + name + "\n";
  for (const diagnose::Bound& bound : diagnosis.bounds)
    out += text("bound      %s: %.1f %%\n", bound.name.c_str(), bound.gain_percent);
  for (const std::string& remark : diagnosis.remarks) out += "remark     " + remark + "\n";
  return out;
}

Result<std::string> answer(const World& world, const Words& line) {
  if (line[0] == "replay") return answer_replay(world, line);
  if (line[0] == "equation") return answer_equation(world, line);
  if (line[0] == "path") return answer_path(world);
  if (line[0] == "diagnose") return answer_diagnose(world);
  return error(Code::invalid_argument, "what is %s?", line[0].c_str());
}

// ---- files ---------------------------------------------------------------------------------

struct Section {
  std::string asked;  // verbatim, up to and with the rule
  Words question;
  std::string expected;
};

// The answers to all sections of a file, and the file as it should be.
struct Answered {
  std::vector<Section> sections;
  std::vector<std::string> answers;
  std::string file;
};

Result<Answered> answered(const std::string& content) {
  Answered out;
  World world;
  std::istringstream in(content);
  Section section;
  bool reading_answer = false;
  size_t number = 0;
  auto close = [&] {
    if (!reading_answer) return;
    out.file += section.asked + out.answers.back();
    out.sections.push_back(std::exchange(section, {}));
    reading_answer = false;
  };
  for (std::string line; std::getline(in, line);) {
    ++number;
    auto where = [&](Error error) { return std::move(error).in(text("line %zu", number)); };
    if (reading_answer && !line.empty()) {
      section.expected += line + "\n";
      continue;
    }
    close();
    section.asked += line + "\n";
    Words words = split(line);
    if (words.empty() || words[0][0] == '#') continue;
    if (words[0] == kRule) {
      if (section.question.empty())
        return where(error(Code::invalid_argument, "nothing was asked"));
      auto answer_text = answer(world, section.question);
      if (!answer_text) return where(std::move(answer_text).error());
      out.answers.push_back(std::move(*answer_text));
      reading_answer = true;
      continue;
    }
    auto described = world.take(words);
    if (!described) return where(std::move(described).error());
    if (!*described) section.question = words;
  }
  close();
  if (!section.question.empty())
    return error(Code::invalid_argument, "the last question has no %s after it", kRule);
  if (out.sections.empty()) return error(Code::invalid_argument, "nothing is asked");
  return out;
}

std::filesystem::path folder() { return WEFT_SCENARIOS_FOLDER; }

std::string content_of(const std::filesystem::path& path) {
  std::ifstream in(path);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

std::vector<std::string> names() {
  std::vector<std::string> out;
  for (const auto& entry : std::filesystem::directory_iterator(folder()))
    if (entry.path().extension() == ".txt") out.push_back(entry.path().stem());
  std::sort(out.begin(), out.end());
  return out;
}

class Scenarios : public ::testing::TestWithParam<std::string> {};

TEST_P(Scenarios, are_as_written) {
  const std::filesystem::path path = folder() / (GetParam() + ".txt");
  const std::string content = content_of(path);
  auto result = answered(content);
  ASSERT_TRUE(result.ok()) << path << ": " << result.error().message();
  const char* mode = std::getenv("WEFT_SCENARIOS");
  if (mode != nullptr && std::string(mode) == "update") {
    if (result->file != content) std::ofstream(path) << result->file;
    return;
  }
  for (size_t i = 0; i < result->sections.size(); ++i)
    EXPECT_EQ(result->answers[i], result->sections[i].expected)
        << "asked:\n"
        << result->sections[i].asked << "`make scenarios` writes what is said now";
  // Nothing outside of the answers may depend on who writes the file.
  EXPECT_EQ(result->file, content) << path;
}

INSTANTIATE_TEST_SUITE_P(All, Scenarios, ::testing::ValuesIn(names()),
                         [](const auto& made) { return made.param; });

// A scenario that has another answer is seen: otherwise all of the above would say nothing.
TEST(ScenarioFiles, another_answer_is_another_file) {
  auto result = answered(
      "cluster ranks 2 link 8gbit\nlayer a 1MB forward 1ms backward 1ms\nplan ddp\nreplay\n----\n"
      "iteration  0.000 ms\n");
  ASSERT_TRUE(result.ok()) << result.error().message();
  ASSERT_EQ(result->sections.size(), 1u);
  EXPECT_NE(result->answers[0], result->sections[0].expected);
  auto again = answered(result->file);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->answers[0], again->sections[0].expected);
}

TEST(ScenarioFiles, what_is_not_understood_is_refused) {
  for (const char* wrong :
       {"cluster rank 4\n", "layer a 1MB forwards 1ms\n", "costs byts 1\n", "rank 1 sped 2\n",
        "plan ddp lane 4\n", "replay\n", "cluster ranks 2 link 8gbit\nplan ddp\nfly\n----\n"})
    EXPECT_FALSE(answered(wrong).ok()) << wrong;
}

}  // namespace
}  // namespace weft::scenarios
