// binding: what Python sees of it, as the module weft.torch._C. It is bound with the pybind11 that
// torch brings along, because a backend travels in torch's holder.
#include <pybind11/chrono.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "backend.h"
#include "recording.h"

namespace py = pybind11;
using weft::torch_backend::Gradients;
using weft::torch_backend::Job;
using weft::torch_backend::ProcessGroupWeft;
using weft::torch_backend::Recording;
using weft::torch_backend::Sums;

namespace {

ProcessGroupWeft& weft_of(const c10::intrusive_ptr<c10d::Backend>& backend) {
  auto* group = dynamic_cast<ProcessGroupWeft*>(backend.get());
  TORCH_CHECK_TYPE(group != nullptr, "this is not a process group of weft");
  return *group;
}

// What the launcher says of this process, or None if there is none (docs/launch.md).
py::object launched() {
  if (!weft::membership::launcher()) return py::none();
  auto found = weft::membership::from_environment();
  if (!found) throw py::value_error("weft: " + found.error().message());
  py::dict out;
  out["launcher"] = found->launcher;
  out["rank"] = found->rank;
  out["size"] = found->size;
  out["local_rank"] = found->local_rank;
  out["local_size"] = found->local_size;
  out["rendezvous"] = found->rendezvous;
  out["secret"] = found->secret;
  return out;
}

// A forward pre-hook of a module, in one call.
struct LayerHook {
  std::shared_ptr<Recording> recording;
  uint32_t layer = 0;
};

using NamedParameter = std::tuple<std::string, at::Tensor, uint32_t>;

std::vector<Recording::Parameter> named(std::vector<NamedParameter> parameters) {
  std::vector<Recording::Parameter> all;
  for (auto& [name, tensor, layer] : parameters) all.push_back({std::move(name), tensor, layer});
  return all;
}

std::shared_ptr<Recording> record(const c10::intrusive_ptr<c10d::Backend>& backend,
                                  std::vector<std::string> layers,
                                  std::vector<NamedParameter> parameters) {
  std::shared_ptr<Job> job = weft_of(backend).job();
  const auto marks = job->marks();
  if (!marks) return nullptr;
  auto made = Recording::start(marks, std::move(layers), named(std::move(parameters)));
  job->before_closing([of = std::weak_ptr(made)] {
    if (auto recording = of.lock()) recording->stop();
  });
  return made;
}

void bind_recording(py::module_& module) {
  py::class_<LayerHook>(module, "LayerHook")
      .def("__call__",
           [](LayerHook& hook, py::handle, py::handle) { hook.recording->layer(hook.layer); })
      // A model that is copied or saved leaves its recording behind.
      .def("__reduce__", [](const LayerHook&) {
        return py::make_tuple(py::module_::import("weft.torch._record").attr("Nothing"),
                              py::tuple());
      });
  py::class_<Recording, std::shared_ptr<Recording>>(module, "Recording")
      .def("stop", &Recording::stop)
      .def(
          "begins",
          [](Recording& self, int carrier, std::optional<uint32_t> step) {
            self.begins(static_cast<Recording::Carrier>(std::clamp(carrier, 0, 2)), step);
          },
          py::arg("carrier"), py::arg("step") = std::nullopt)
      .def("buckets", &Recording::buckets, py::arg("of_parameter"))
      .def("hook_of",
           [](std::shared_ptr<Recording> self, uint32_t layer) {
             return LayerHook{std::move(self), layer};
           })
      .def("forwarded", &Recording::forwarded, py::arg("outputs"))
      .def("waits", &Recording::waits, py::arg("layer"))
      .def("update_begins", &Recording::update_begins)
      .def(
          "update_ends",
          [](Recording& self, std::optional<uint32_t> layer) {
            self.update_ends(layer.value_or(weft::trace::kNone));
          },
          py::arg("layer") = std::nullopt)
      .def("loading_begins", &Recording::loading_begins)
      .def("loading_ends", &Recording::loading_ends)
      .def("now", py::overload_cast<>(&Recording::now, py::const_))
      .def("summed", &Recording::summed, py::arg("number"), py::arg("bytes"), py::arg("began"));
  module.def(
      "record_alone",
      [](const std::string& folder, uint32_t rank, uint32_t ranks, std::vector<std::string> layers,
         std::vector<NamedParameter> parameters) {
        return Recording::start_alone(folder, rank, ranks, std::move(layers),
                                      named(std::move(parameters)));
      },
      py::arg("folder"), py::arg("rank"), py::arg("ranks"), py::arg("layers"),
      py::arg("parameters"));
  module.def("record", &record, py::arg("backend"), py::arg("layers"), py::arg("parameters"));
}

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// A job's exchange, as Python holds it.
struct ExchangeHandle {
  std::shared_ptr<Job> job;

  // What `ask` finds out of it.
  template <typename F>
  auto of(F&& ask) const {
    decltype(ask(std::declval<Sums&>())) answer{};
    job->use_sums([&](Sums& sums) { answer = ask(sums); });
    return answer;
  }
  void ready(uint32_t tensor, uint64_t step, bool has_gradient) const {
    job->use_sums([&](Sums& sums) { sums.ready(tensor, step, has_gradient); });
  }
  void wait(const std::vector<uint32_t>& tensors, uint64_t step) const {
    job->use_sums([&](Sums& sums) {
      for (uint32_t tensor : tensors) sums.wait(tensor, step);
    });
  }
};

ExchangeHandle exchange(const BackendPtr& backend, std::vector<std::string> layers,
                        std::vector<std::string> names, std::vector<uint32_t> layer_of,
                        const std::vector<at::Tensor>& parameters) {
  ProcessGroupWeft& group = weft_of(backend);
  TORCH_CHECK_VALUE(names.size() == parameters.size() && layer_of.size() == names.size(),
                    "weft: an exchange needs a name and a layer for each parameter");
  TORCH_CHECK_VALUE(group.is_whole_job(),
                    "weft: gradients are exchanged among all ranks of the first process group, and "
                    "this one has some of them only");
  group.job()->exchange({std::move(layers), std::move(names), std::move(layer_of)}, parameters);
  return {group.job()};
}

// The name of a plan, and the hash that says what it does.
using PlanSays = std::pair<std::string, std::string>;
PlanSays says(const weft::plan::Plan& plan) { return {plan.name, weft::plan::hash(plan)}; }

// `words`: a document, a file or a preset.
weft::Result<weft::plan::Plan> plan_of(const std::string& words) {
  bool document = words.find('{') != std::string::npos;
  return document ? weft::plan::parse(words) : weft::plan::load(words);
}

PlanSays read_plan(const std::string& words) {
  auto plan = plan_of(words);
  TORCH_CHECK_VALUE(plan.ok(), "weft: plan: ", plan.ok() ? "" : plan.error().message());
  return says(*plan);
}

void bind_exchange(py::module& module) {
  using torch::wrap_pybind_function;
  using torch::wrap_pybind_function_no_gil;
  py::class_<ExchangeHandle>(module, "Exchange")
      .def("slots", wrap_pybind_function([](const ExchangeHandle& exchange) {
             return exchange.of([](Sums& sums) { return sums.slots(); });
           }))
      .def("by_tensor", wrap_pybind_function([](const ExchangeHandle& exchange) {
             return exchange.of([](Sums& sums) { return sums.by_tensor(); });
           }))
      .def("buckets", wrap_pybind_function([](const ExchangeHandle& exchange) {
             return exchange.of([](Sums& sums) { return sums.buckets(); });
           }))
      .def("plan", wrap_pybind_function([](const ExchangeHandle& exchange) {
             return exchange.of([](Sums& sums) { return says(sums.plan()); });
           }))
      .def("change_plan",
           wrap_pybind_function_no_gil([](const ExchangeHandle& exchange, const std::string& words,
                                          const std::optional<std::string>& refusal) {
             exchange.job->use_sums([&](Sums& sums) {
               sums.change_plan(
                   refusal ? weft::error(weft::Code::invalid_argument, "%s", refusal->c_str())
                           : plan_of(words));
             });
           }),
           py::arg("words"), py::arg("refusal") = std::nullopt)
      .def("next_step", wrap_pybind_function([](const ExchangeHandle& exchange) {
             return exchange.of([](Sums& sums) { return sums.next_step(); });
           }))
      .def("ready",
           wrap_pybind_function_no_gil([](const ExchangeHandle& exchange, uint32_t tensor,
                                          uint64_t step) { exchange.ready(tensor, step, true); }),
           py::arg("tensor"), py::arg("step"))
      .def("ready_without",
           wrap_pybind_function_no_gil([](const ExchangeHandle& exchange, uint32_t tensor,
                                          uint64_t step) { exchange.ready(tensor, step, false); }),
           py::arg("tensor"), py::arg("step"))
      .def("wait",
           wrap_pybind_function_no_gil([](const ExchangeHandle& exchange,
                                          const std::vector<uint32_t>& tensors,
                                          uint64_t step) { exchange.wait(tensors, step); }),
           py::arg("tensors"), py::arg("step"));
  module.def("exchange", wrap_pybind_function_no_gil(exchange), py::arg("backend"),
             py::arg("layers"), py::arg("names"), py::arg("layer_of"), py::arg("parameters"));
  module.def("plan", wrap_pybind_function([](const BackendPtr& backend) {
               return says(weft_of(backend).job()->plan());
             }),
             py::arg("backend"));
  module.def("read_plan", wrap_pybind_function(read_plan), py::arg("words"));
  module.def(
      "is_weft",
      [](const BackendPtr& backend) {
        return dynamic_cast<ProcessGroupWeft*>(backend.get()) != nullptr;
      },
      py::arg("backend"));
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "weft as a backend of torch.distributed";
  module.def(
      "create",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
         std::chrono::milliseconds timeout,
         std::vector<int64_t> ranks) -> c10::intrusive_ptr<c10d::Backend> {
        return ProcessGroupWeft::make(store, rank, size, timeout, std::move(ranks));
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("ranks"),
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "status",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) {
        return weft_of(backend).job()->status();
      },
      py::arg("backend"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "failure",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) -> std::optional<std::string> {
        auto failure = weft_of(backend).job()->failure();
        return failure ? std::optional(failure->message()) : std::nullopt;
      },
      py::arg("backend"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "culprit",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) {
        return weft_of(backend).job()->culprit();
      },
      py::arg("backend"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "close_all",
      [](std::chrono::milliseconds patience) {
        Job::close_all(patience);
        weft::torch_backend::Completer::stop_all();
      },
      py::arg("patience"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "staging",
      [](const c10::intrusive_ptr<c10d::Backend>& backend) {
        auto figures = weft_of(backend).staging();
        return std::map<std::string, uint64_t>{
            {"allocations", figures.allocations}, {"used", figures.used}, {"kept", figures.kept}};
      },
      py::arg("backend"));
  module.def("launched", &launched);
  bind_recording(module);
  bind_exchange(module);
  module.def("version", [] { return std::string(weft::version()); });
}
