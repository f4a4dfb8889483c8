// ftbert.lib._tuning: the tuner for Python, by pybind11. No torch here: device memory comes as addresses. It links
// libftbert.so, so that a table set here is the one that models in this process use.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "core/check.h"
#include "gemm/gemm.h"
#include "gemm/table.h"
#include "gemm/tuner/tuner.h"
#include "kernels/kernels.h"

namespace py = pybind11;
using namespace py::literals;

namespace ftbert::binding {
namespace {

const void* address(uintptr_t pointer) { return reinterpret_cast<const void*>(pointer); }
void* writable(uintptr_t pointer) { return reinterpret_cast<void*>(pointer); }

using Row = std::tuple<Product, int64_t, int64_t, std::string, std::string, std::array<uint64_t, 8>>;

// types: of a, b and c
Product linear_product(int64_t m, int64_t n, int64_t k, const std::array<std::string, 3>& types, bool bias,
                       const std::string& activation, bool layernorm, bool gated, bool prenorm) {
  const auto [a, b, c] = types;
  FTBERT_CHECK(!layernorm || !prenorm, "a product has one norm behind it, of its result or for the next block");
  Epilogue epilogue{.bias = bias, .activation = parse_activation(activation), .gate = gated ? Gate::pairs : Gate::none};
  epilogue.residual = layernorm || prenorm;
  epilogue.after = layernorm ? After::norm : prenorm ? After::norm_beside : After::nothing;
  return {.m = m,
          .n = n,
          .k = k,
          .a = parse_format(a).numbers,
          .b = &parse_format(b),
          .c = parse_format(c).numbers,
          .epilogue = epilogue};
}

OwnChoice own_choice(const std::string& kernel, const std::string& variant) {
  const OwnChoice own = find_own(kernel, variant);
  FTBERT_CHECK(own, "this build has no product ", kernel, " ", variant);
  return own;
}

using Names = std::vector<std::pair<std::string_view, std::vector<std::string_view>>>;  // kernels, their variants

Names own_names() {
  Names all;
  for (const OwnKernel* kernel : own_kernels()) {
    auto& variants = all.emplace_back(kernel->name, std::vector<std::string_view>()).second;
    for (const OwnVariant& variant : kernel->variants) variants.push_back(variant.name());
  }
  return all;
}

PYBIND11_MODULE(_tuning, m) {
  py::register_exception<Error>(m, "Error", PyExc_RuntimeError);

  py::class_<Product>(m, "Product")
      .def(py::init(&linear_product), "m"_a, "n"_a, "k"_a, "types"_a, "bias"_a, "activation"_a, "layernorm"_a,
           "gated"_a, "prenorm"_a);

  // Of ours kernel, variant ("" of cuBLASLt's), tile_rows, tile_columns, split_k; of cuBLASLt's data, id.
  py::class_<Algorithm>(m, "Algorithm")
      .def(py::init([](const std::array<uint64_t, 8>& data) { return Algorithm{.data = data}; }), "data"_a)
      .def_property_readonly("kernel", [](const Algorithm& a) { return a.own ? a.own.kernel->name : ""; })
      .def_property_readonly("variant", [](const Algorithm& a) { return a.own ? a.own.variant_name() : ""; })
      .def_property_readonly("tile_rows", [](const Algorithm& a) { return a.tile.rows; })
      .def_property_readonly("tile_columns", [](const Algorithm& a) { return a.tile.columns; })
      .def_property_readonly("split_k", [](const Algorithm& a) { return a.tile.split; })
      .def_readonly("data", &Algorithm::data)
      .def_readonly("id", &Algorithm::id);

  py::class_<Recording>(m, "Recording")
      .def("microseconds", &Recording::microseconds, py::call_guard<py::gil_scoped_release>());

  py::class_<Tuner>(m, "Tuner")
      .def(py::init([](int device, const Product& product, uintptr_t workspace, uintptr_t ones) {
             return make_tuner(device, product, writable(workspace), static_cast<const float*>(address(ones)));
           }),
           "device"_a, "product"_a, "workspace"_a, "ones"_a)
      .def("heuristics", &Tuner::heuristics, "most"_a, py::call_guard<py::gil_scoped_release>())
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

  // rows: (product, from, to, kernel, variant, data) each; without a kernel data is cuBLASLt's algorithm
  m.def(
      "set_table",
      [](int device, const std::vector<Row>& rows) {
        std::vector<TunedRow> table;
        for (const auto& [product, from, to, kernel, variant, data] : rows)
          table.push_back({product, from, to, kernel.empty() ? OwnChoice() : own_choice(kernel, variant), data});
        set_table(device, table);
      },
      "device"_a, "rows"_a);
  m.def("own_kernels", &own_names);  // [(kernel, variants)]
  m.def(
      "supports",  // gpu: capability (90), multiprocessors
      [](const std::array<int, 2>& gpu, const std::string& kernel, const std::string& variant, const Product& product) {
        const OwnChoice own = own_choice(kernel, variant);
        return own.kernel->supports({gpu[0], gpu[1]}, own.variant, product);
      },
      "gpu"_a, "kernel"_a, "variant"_a, "product"_a);
  m.def("is_known", &is_known, "kernel"_a, "variant"_a);  // whether this build has what a row names
  m.def("rows", &cuda_gemm_rows, "m"_a);                  // the m that the encoder runs
  m.def("fuses_heads_of", &FusedHeads::has, "size"_a);
  m.def("workspace_bytes", [](int device) { return gemm_workspace_bytes(device); }, "device"_a);
}

}  // namespace
}  // namespace ftbert::binding
