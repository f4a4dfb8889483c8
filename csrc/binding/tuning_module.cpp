// ftbert.lib._tuning: the tuner for Python, by pybind11. No torch here: device memory comes as addresses. It links
// libftbert.so, so that a table set here is the one that models in this process use.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "core/check.h"
#include "gemm/cublaslt.h"
#include "gemm/gemm.h"
#include "gemm/tuner/tuner.h"

namespace py = pybind11;
using namespace py::literals;

namespace ftbert::binding {
namespace {

const void* address(uintptr_t pointer) { return reinterpret_cast<const void*>(pointer); }
void* writable(uintptr_t pointer) { return reinterpret_cast<void*>(pointer); }

PYBIND11_MODULE(_tuning, m) {
  py::register_exception<Error>(m, "Error", PyExc_RuntimeError);

  py::class_<GemmProblem>(m, "Problem")
      .def(py::init([](int64_t rows, int64_t n, int64_t k, const std::string& dtype, bool bias,
                       const std::string& activation, bool layernorm) {
             return GemmProblem{rows, n, k, parse_dtype(dtype), bias, parse_activation(activation), layernorm};
           }),
           "m"_a, "n"_a, "k"_a, "dtype"_a, "bias"_a, "activation"_a, "layernorm"_a);

  py::class_<GemmAlgorithm>(m, "Algorithm")
      .def_readonly("data", &GemmAlgorithm::data)
      .def_readonly("id", &GemmAlgorithm::id)
      .def_readonly("tile", &GemmAlgorithm::tile)
      .def_readonly("tile_rows", &GemmAlgorithm::tile_rows)
      .def_readonly("tile_columns", &GemmAlgorithm::tile_columns)
      .def_readonly("stages", &GemmAlgorithm::stages)
      .def_readonly("split_k", &GemmAlgorithm::split_k)
      .def_readonly("reduction", &GemmAlgorithm::reduction)
      .def_readonly("swizzle", &GemmAlgorithm::swizzle)
      .def_readonly("custom", &GemmAlgorithm::custom)
      .def_readonly("inner_shape", &GemmAlgorithm::inner_shape)
      .def_readonly("cluster", &GemmAlgorithm::cluster)
      .def_readonly("folds", &GemmAlgorithm::folds)
      .def_readonly("workspace", &GemmAlgorithm::workspace)
      .def_readonly("waves", &GemmAlgorithm::waves);

  py::class_<GemmRecording>(m, "Recording")
      .def("microseconds", &GemmRecording::microseconds, py::call_guard<py::gil_scoped_release>());

  py::class_<GemmTuner>(m, "Tuner")
      .def(py::init([](int device, const GemmProblem& problem, uintptr_t workspace) {
             return make_gemm_tuner(device, problem, writable(workspace));
           }),
           "device"_a, "problem"_a, "workspace"_a)
      .def("heuristics", &GemmTuner::heuristics, "most"_a, py::call_guard<py::gil_scoped_release>())
      .def("enumerate", &GemmTuner::enumerate, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("c_bytes", &GemmTuner::c_bytes)
      .def("fused", &GemmTuner::fused)
      .def("chosen", &GemmTuner::chosen)
      .def(
          "run",
          [](GemmTuner& self, const GemmAlgorithm& algorithm, uintptr_t a, uintptr_t b, uintptr_t bias, uintptr_t c) {
            self.run(algorithm, address(a), address(b), address(bias), writable(c));
          },
          "algorithm"_a, "a"_a, "b"_a, "bias"_a, "c"_a, py::call_guard<py::gil_scoped_release>())
      .def(
          "record",
          [](GemmTuner& self, const GemmAlgorithm& algorithm, uintptr_t a, uintptr_t b, int64_t weights, uintptr_t bias,
             uintptr_t c) {
            return self.record(algorithm, address(a), address(b), weights, address(bias), writable(c));
          },
          "algorithm"_a, "a"_a, "b"_a, "weights"_a, "bias"_a, "c"_a, py::keep_alive<0, 1>(),
          py::call_guard<py::gil_scoped_release>());

  // rows: (dtype, bias, activation, layernorm, n, k, from, to, data) each
  m.def(
      "set_table",
      [](int device, const std::vector<std::tuple<std::string, bool, std::string, bool, int64_t, int64_t, int64_t,
                                                  int64_t, std::array<uint64_t, 8>>>& rows) {
        std::vector<TunedGemm> table;
        for (const auto& [dtype, bias, activation, layernorm, n, k, from, to, data] : rows)
          table.push_back(
              {{0, n, k, parse_dtype(dtype), bias, parse_activation(activation), layernorm}, from, to, data});
        set_gemm_table(device, table);
      },
      "device"_a, "rows"_a);
  m.def("is_known", &is_known, "words"_a);  // whether this build has what a row names
  m.def("rows", &cuda_gemm_rows, "m"_a);    // the m that the encoder runs
  m.def("workspace_bytes", [](int device) { return gemm_workspace_bytes(device); }, "device"_a);
}

}  // namespace
}  // namespace ftbert::binding
