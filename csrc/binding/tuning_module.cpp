// ftbert.lib._tuning: the tuner for Python, by pybind11. No torch here: device memory comes as addresses. It links
// libftbert.so, so that a table set here is the one that models in this process use.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "core/check.h"
#include "gemm/cublaslt.h"
#include "gemm/gemm.h"
#include "gemm/table.h"
#include "gemm/tuner/tuner.h"

namespace py = pybind11;
using namespace py::literals;

namespace ftbert::binding {
namespace {

const void* address(uintptr_t pointer) { return reinterpret_cast<const void*>(pointer); }
void* writable(uintptr_t pointer) { return reinterpret_cast<void*>(pointer); }

using Row = std::tuple<std::string, bool, std::string, bool, int64_t, int64_t, int64_t, int64_t, std::string,
                       std::string, std::array<uint64_t, 8>>;

Product linear_product(int64_t m, int64_t n, int64_t k, const std::string& dtype, bool bias,
                       const std::string& activation, bool layernorm) {
  const DType type = parse_dtype(dtype);
  return {m, n, k, type, type, type, {bias, parse_activation(activation), layernorm}};
}

PYBIND11_MODULE(_tuning, m) {
  py::register_exception<Error>(m, "Error", PyExc_RuntimeError);

  py::class_<Product>(m, "Product")
      .def(py::init(&linear_product), "m"_a, "n"_a, "k"_a, "dtype"_a, "bias"_a, "activation"_a, "layernorm"_a);

  // kernel, variant: of ours, else "". Everything from `data` on is cuBLASLt's, but for the tile and split_k.
  py::class_<Algorithm>(m, "Algorithm")
      .def_property_readonly("kernel", [](const Algorithm& a) { return a.own ? a.own.kernel->name : ""; })
      .def_property_readonly("variant", [](const Algorithm& a) { return a.own ? a.own.variant_name() : ""; })
      .def_readonly("data", &Algorithm::data)
      .def_readonly("id", &Algorithm::id)
      .def_readonly("tile", &Algorithm::tile)
      .def_readonly("tile_rows", &Algorithm::tile_rows)
      .def_readonly("tile_columns", &Algorithm::tile_columns)
      .def_readonly("stages", &Algorithm::stages)
      .def_readonly("split_k", &Algorithm::split_k)
      .def_readonly("reduction", &Algorithm::reduction)
      .def_readonly("swizzle", &Algorithm::swizzle)
      .def_readonly("custom", &Algorithm::custom)
      .def_readonly("inner_shape", &Algorithm::inner_shape)
      .def_readonly("cluster", &Algorithm::cluster)
      .def_readonly("workspace", &Algorithm::workspace)
      .def_readonly("waves", &Algorithm::waves);

  py::class_<Recording>(m, "Recording")
      .def("microseconds", &Recording::microseconds, py::call_guard<py::gil_scoped_release>());

  py::class_<Tuner>(m, "Tuner")
      .def(py::init([](int device, const Product& product, uintptr_t workspace) {
             return make_tuner(device, product, writable(workspace));
           }),
           "device"_a, "product"_a, "workspace"_a)
      .def("heuristics", &Tuner::heuristics, "most"_a, py::call_guard<py::gil_scoped_release>())
      .def("enumerate", &Tuner::enumerate, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("c_bytes", &Tuner::c_bytes)
      .def("own", &Tuner::own)
      .def("chosen", &Tuner::chosen)
      .def(
          "run",
          [](Tuner& self, const Algorithm& algorithm, uintptr_t a, uintptr_t b, uintptr_t bias, uintptr_t c) {
            self.run(algorithm, address(a), address(b), address(bias), writable(c));
          },
          "algorithm"_a, "a"_a, "b"_a, "bias"_a, "c"_a, py::call_guard<py::gil_scoped_release>())
      .def(
          "record",
          [](Tuner& self, const Algorithm& algorithm, uintptr_t a, uintptr_t b, int64_t weights, uintptr_t bias,
             uintptr_t c) {
            return self.record(algorithm, address(a), address(b), weights, address(bias), writable(c));
          },
          "algorithm"_a, "a"_a, "b"_a, "weights"_a, "bias"_a, "c"_a, py::keep_alive<0, 1>(),
          py::call_guard<py::gil_scoped_release>());

  // rows: (dtype, bias, activation, layernorm, n, k, from, to, kernel, variant, data) each; without a kernel data is
  // cuBLASLt's algorithm
  m.def(
      "set_table",
      [](int device, const std::vector<Row>& rows) {
        std::vector<TunedRow> table;
        for (const auto& [dtype, bias, activation, layernorm, n, k, from, to, kernel, variant, data] : rows) {
          const OwnChoice own = find_own(kernel, variant);
          FTBERT_CHECK(own || kernel.empty(), "this build has no product ", kernel, " ", variant);
          table.push_back({linear_product(0, n, k, dtype, bias, activation, layernorm), from, to, own, data});
        }
        set_table(device, table);
      },
      "device"_a, "rows"_a);
  m.def("is_known", &is_known, "kernel"_a, "variant"_a);  // whether this build has what a row names
  m.def("rows", &cuda_gemm_rows, "m"_a);                  // the m that the encoder runs
  m.def("workspace_bytes", [](int device) { return gemm_workspace_bytes(device); }, "device"_a);
}

}  // namespace
}  // namespace ftbert::binding
