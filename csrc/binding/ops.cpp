// torch.classes.ftbert.Encoder, and its calls as ops, so that torch.compile and torch.export see one node.
#include <torch/library.h>

#include "binding/encoder_class.h"
#include "binding/gemm_torch.h"
#include "binding/index_checks.h"
#include "binding/tensors.h"
#include "core/device.h"
#include "kernels/isa.h"

namespace ftbert::binding {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using EncoderPtr = c10::intrusive_ptr<EncoderClass>;

std::tuple<Tensor, Tensor> forward(const EncoderPtr& encoder, const Tensor& ids, const OptionalTensor& mask,
                                   const OptionalTensor& types) {
  return encoder->engine().forward(ids, mask, types);
}

std::tuple<Tensor, Tensor> forward_first(const EncoderPtr& encoder, const Tensor& ids, const OptionalTensor& mask,
                                         const OptionalTensor& types) {
  return encoder->engine().forward_first(ids, mask, types);
}

Tensor forward_first_packed(const EncoderPtr& encoder, const Tensor& ids, const Tensor& cu, int64_t max_seqlen,
                            const OptionalTensor& types) {
  return encoder->engine().forward_first_packed(ids, cu, max_seqlen, types);
}

Tensor forward_packed(const EncoderPtr& encoder, const Tensor& ids, const Tensor& cu, int64_t max_seqlen,
                      const OptionalTensor& types) {
  return encoder->engine().forward_packed(ids, cu, max_seqlen, types);
}

Tensor forward_hidden_states(const EncoderPtr& encoder, const Tensor& ids, const OptionalTensor& mask,
                             const OptionalTensor& types) {
  return encoder->engine().forward_hidden_states(ids, mask, types);
}

std::tuple<Tensor, Tensor, Tensor> forward_unpadded(const EncoderPtr& encoder, const Tensor& ids,
                                                    const OptionalTensor& mask, const OptionalTensor& types) {
  return encoder->engine().forward_unpadded(ids, mask, types);
}

// THE list of weight names, for whoever converts or loads.
c10::Dict<std::string, std::vector<int64_t>> weight_shapes(const StringDict& config) {
  c10::Dict<std::string, std::vector<int64_t>> shapes;
  for (const WeightSpec& spec : weight_specs(EncoderConfig::parse(to_map(config))))
    shapes.insert(spec.name, spec.shape);
  return shapes;
}

StringDict build_info() {
  StringDict info;
  std::string why_not;
  const bool cuda = cuda_available(&why_not);
  info.insert("cuda", cuda ? "yes" : "no");
  if (!cuda) info.insert("cuda_reason", why_not);
  info.insert("cpu_isa", std::string(cpu_isa()));
  info.insert("cpu_gemm", torch_gemm_name());
  if (cuda) info.insert("cuda_gemm", gemm_library_version());
  return info;
}

// A GEMM operand in the layout that the encoder keeps on the CPU, so that a loader need not hold both.
Tensor pack(const Tensor& weight) {
  plain("weight", weight);
  const bool real = weight.scalar_type() == at::kFloat || weight.scalar_type() == at::kBFloat16;
  FTBERT_CHECK(weight.dim() == 2 && weight.numel() > 0 && weight.is_cpu() && real,
               "weight: expected float32 or bfloat16 [n, k] on the CPU, got ", describe(weight));
  return pack_weight(weight);
}

Tensor pool(const EncoderPtr& encoder, const Tensor& hidden, const Tensor& cu) {
  plain("hidden", hidden);
  plain("cu_seqlens", cu);
  FTBERT_CHECK(hidden.dim() == 2 && hidden.device() == encoder->device() && hidden.scalar_type() == encoder->dtype() &&
                   hidden.size(1) == encoder->config().hidden,
               "hidden: expected what forward_packed returns, ", at::toString(encoder->dtype()), " [tokens, ",
               encoder->config().hidden, "] on ", encoder->device().str(), ", got ", describe(hidden));
  FTBERT_CHECK(cu.dim() == 1 && cu.size(0) >= 1 && cu.scalar_type() == at::kInt && cu.device() == hidden.device() &&
                   cu.is_contiguous(),
               "cu_seqlens: expected contiguous Int [batch+1] on ", hidden.device().str(), ", got ", describe(cu));
  check_offsets(cu, hidden.size(0));
  return encoder->engine().pool(hidden, cu);
}

}  // namespace

TORCH_LIBRARY(ftbert, m) {
  m.class_<EncoderClass>("Encoder")
      .def(torch::init<TensorDict, StringDict, std::string>(), "",
           {torch::arg("weights"), torch::arg("config"), torch::arg("attention") = "auto"})
      .def("forward",
           [](const EncoderPtr& self, const Tensor& ids, const OptionalTensor& mask, const OptionalTensor& types) {
             return self->engine().forward(ids, mask, types);
           },
           "",
           {torch::arg("input_ids"), torch::arg("attention_mask") = at::IValue(),
            torch::arg("token_type_ids") = at::IValue()})
      .def("forward_packed",
           [](const EncoderPtr& self, const Tensor& ids, const Tensor& cu, int64_t max_seqlen,
              const OptionalTensor& types) { return self->engine().forward_packed(ids, cu, max_seqlen, types); },
           "",
           {torch::arg("input_ids"), torch::arg("cu_seqlens"), torch::arg("max_seqlen"),
            torch::arg("token_type_ids") = at::IValue()})
      .def("weights", [](const EncoderPtr& self) { return self->weights(); })
      .def("config", [](const EncoderPtr& self) { return self->config_entries(); })
      .def("use_cuda_graphs", [](const EncoderPtr& self, bool on) { self->engine().use_cuda_graphs(on); })
      .def("info", [](const EncoderPtr& self) { return self->info(); })
      .def("device", [](const EncoderPtr& self) { return self->device(); })
      .def("hidden", [](const EncoderPtr& self) { return self->config().hidden; })
      .def("has_pooler", [](const EncoderPtr& self) { return self->config().pooler; })
      .def("layers", [](const EncoderPtr& self) { return self->config().layers; })
      // A tensor that kernels read as it lies, for heads that share it (a tied decoder).
      .def("weight", [](const EncoderPtr& self, const std::string& name) { return self->weight(name); })
      .def("dtype", [](const EncoderPtr& self) { return std::string(to_string(dtype_of(self->dtype()))); })
      .def("product_dtype",
           [](const EncoderPtr& self) { return std::string(to_string(dtype_of(self->product_dtype()))); })
      .def("to", [](const EncoderPtr& self, at::Device device,
                    const std::string& dtype) { return self->to(device, parse_scalar_type(dtype)); })
      .def("__obj_flatten__",
           [](const EncoderPtr& self) {
             return std::make_tuple(
                 std::make_tuple(std::string("device"), self->device()),
                 std::make_tuple(std::string("dtype"), std::string(to_string(dtype_of(self->dtype())))),
                 std::make_tuple(std::string("hidden"), self->config().hidden),
                 std::make_tuple(std::string("layers"), self->config().layers),
                 std::make_tuple(std::string("has_pooler"), self->config().pooler));
           })
      .def_pickle(
          [](const EncoderPtr& self) {
            return std::make_tuple(self->weights(), self->config_entries(), self->attention());
          },
          [](std::tuple<TensorDict, StringDict, std::string> state) {
            return c10::make_intrusive<EncoderClass>(std::get<0>(state), std::get<1>(state), std::get<2>(state));
          });

  // Calls record graphs of their own, with memory that outlives the call: inside a graph of torch.compile's there is
  // no place for that.
  const std::vector<at::Tag> alone{at::Tag::cudagraph_unsafe};
  m.def(
      "forward(__torch__.torch.classes.ftbert.Encoder encoder, Tensor input_ids, Tensor? attention_mask, Tensor? "
      "token_type_ids) -> (Tensor, Tensor)",
      alone);
  m.def(
      "forward_first(__torch__.torch.classes.ftbert.Encoder encoder, Tensor input_ids, Tensor? attention_mask, Tensor? "
      "token_type_ids) -> (Tensor, Tensor)",
      alone);
  m.def(
      "forward_first_packed(__torch__.torch.classes.ftbert.Encoder encoder, "
      "Tensor input_ids, Tensor cu_seqlens, SymInt max_seqlen, Tensor? token_type_ids) -> Tensor",
      alone);
  m.def(
      "forward_hidden_states(__torch__.torch.classes.ftbert.Encoder encoder, Tensor input_ids, Tensor? attention_mask, "
      "Tensor? token_type_ids) -> Tensor",
      alone);
  m.def(
      "forward_unpadded(__torch__.torch.classes.ftbert.Encoder encoder, Tensor input_ids, Tensor? attention_mask, "
      "Tensor? token_type_ids) -> (Tensor, Tensor, Tensor)",
      alone);
  m.def(
      "forward_packed(__torch__.torch.classes.ftbert.Encoder encoder, "
      "Tensor input_ids, Tensor cu_seqlens, SymInt max_seqlen, Tensor? token_type_ids) -> Tensor",
      alone);
  m.def("pool(__torch__.torch.classes.ftbert.Encoder encoder, Tensor hidden, Tensor cu_seqlens) -> Tensor");

  m.def("weight_shapes(Dict(str, str) config) -> Dict(str, int[])", &weight_shapes);
  m.def("build_info() -> Dict(str, str)", &build_info);
  m.def("pack_weight(Tensor weight) -> Tensor");
}

// One implementation for both devices: the core's own switch chooses.
#define FTBERT_ENCODER_OPS(m)                              \
  m.impl("forward", &forward);                             \
  m.impl("forward_packed", &forward_packed);               \
  m.impl("forward_first", &forward_first);                 \
  m.impl("forward_first_packed", &forward_first_packed);   \
  m.impl("forward_hidden_states", &forward_hidden_states); \
  m.impl("forward_unpadded", &forward_unpadded);           \
  m.impl("pool", &pool);                                   \
  m.impl("pack_weight", &pack)
TORCH_LIBRARY_IMPL(ftbert, CPU, m) { FTBERT_ENCODER_OPS(m); }
TORCH_LIBRARY_IMPL(ftbert, CUDA, m) { FTBERT_ENCODER_OPS(m); }

}  // namespace ftbert::binding
