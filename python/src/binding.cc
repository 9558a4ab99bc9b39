// binding: what Python sees of it, as the module weft.torch._C. It is bound with the pybind11 that
// torch brings along, because a backend travels in torch's holder.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "backend.h"

namespace py = pybind11;
using weft::torch_backend::Job;
using weft::torch_backend::ProcessGroupWeft;

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
  module.def("launched", &launched);
  module.def("version", [] { return std::string(weft::version()); });
}
