// torch.classes.ftbert.Encoder and Decoder, and the encoder's calls as ops, so that torch.compile and torch.export see
// one node.
#include <ATen/core/dispatch/Dispatcher.h>

#include <climits>

#include "binding/call_words.h"
#include "binding/decoder_class.h"
#include "binding/define_op.h"
#include "binding/engine.h"
#include "binding/packed_weight.h"
#include "binding/process_group.h"
#include "binding/q8_0.h"
#include "binding/tensors.h"
#include "binding/torch_products.h"
#include "core/device.h"
#include "core/json.h"
#include "gemm/cpu/kernel.h"
#include "gemm/gpu/own.h"
#include "kernels/isa.h"
#include "layers/layer_stack.h"

namespace ftbert::binding {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using DecoderPtr = c10::intrusive_ptr<DecoderClass>;

Want parse_want(std::string_view word) {
  std::string known;
  for (const auto& [name, want] : kWants) {
    if (name == word) return want;
    known += (known.empty() ? "" : ", ") + std::string(name);
  }
  fail("want: expected some of ", known, ", got '", word, "'");
}

std::vector<Tensor> forward_batch(const EncoderPtr& encoder, const Tensor& ids, const OptionalTensor& mask,
                                  const OptionalTensor& types, const OptionalTensor& cu, int64_t max_seqlen,
                                  const c10::List<std::string>& want, const OptionalTensor& rows, int64_t shared_prefix,
                                  const OptionalTensor& keys) {
  FTBERT_CHECK(!cu || !mask, "attention_mask: packed ids (with cu_seqlens) have none");
  std::vector<Want> wants;
  for (size_t i = 0; i < want.size(); ++i) wants.push_back(parse_want(want.get(i)));
  return encoder->engine().forward({.input_ids = ids,
                                    .attention_mask = mask,
                                    .token_type_ids = types,
                                    .cu_seqlens = cu,
                                    .max_seqlen = max_seqlen,
                                    .rows = rows,
                                    .shared_prefix = shared_prefix,
                                    .keys = keys},
                                   wants);
}

// The op, called from C++: half of a small call from Python is what torch.ops makes of its arguments.
std::vector<Tensor> dispatch_forward_batch(const EncoderPtr& encoder, const Tensor& ids, const OptionalTensor& mask,
                                           const OptionalTensor& types, const OptionalTensor& cu, int64_t max_seqlen,
                                           const c10::List<std::string>& want, const OptionalTensor& rows,
                                           int64_t shared_prefix, const OptionalTensor& keys) {
  using Op = std::vector<Tensor>(const EncoderPtr&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                 const OptionalTensor&, c10::SymInt, const c10::List<std::string>&,
                                 const OptionalTensor&, int64_t, const OptionalTensor&);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("ftbert::forward_batch", "").typed<Op>();
  return op.call(encoder, ids, mask, types, cu, max_seqlen, want, rows, shared_prefix, keys);
}

// THE list of weight names, for whoever converts or loads: name, shape, whether it is the operand of a product, and the
// type in which it is stored, "" where that is the model's.
using ListedWeight = std::tuple<std::string, std::vector<int64_t>, bool, std::string>;
// The whole description (ModelConfig::parse), and the tensors that it asks for.
std::tuple<std::string, std::vector<ListedWeight>> read_config(const std::string& config) {
  std::string whole;
  const ModelConfig parsed = ModelConfig::parse(config, &whole);
  check_layers_exist(parsed);
  std::vector<ListedWeight> specs;
  for (const WeightSpec& spec : weight_specs(parsed))
    specs.emplace_back(spec.name, spec.shape, spec.matrix, spec.type ? std::string(spec.type->name) : "");
  return {whole, specs};
}

StringDict activations() {
  StringDict names;
  for (const auto& [spelling, name] : activation_spellings()) names.insert(std::string(spelling), std::string(name));
  return names;
}

// The table of formats: each row as JSON, by its name.
StringDict formats_table() {
  StringDict rows;
  const auto word = [](std::string_view text) { return Json{std::string(text)}; };
  for (const Format* f : all_formats()) {
    const Json::Object row{{"name", word(f->name)},
                           {"numbers", word(to_string(f->numbers))},
                           {"bits", {int64_t{f->bits}}},
                           {"block", {int64_t{f->block}}},
                           {"scales", word(to_string(f->scales))},
                           {"minima", {f->minima}},
                           {"inside", {f->inside}},
                           {"in_checkpoints", {f->in_checkpoints}},
                           {"other", word(f->other ? f->other->name : "")},
                           {"rows_of", {int64_t{f->rows_of}}},
                           {"columns_of", {int64_t{f->columns_of}}},
                           {"least_columns", {f->least_columns}},
                           {"most_columns", {f->most_columns}},
                           {"cpu", {kernel_for(*f) || lacking_for(*f)}},
                           {"first_gpu", {int64_t{f->first_gpu}}}};
    rows.insert(std::string(f->name), json_text({row}));
  }
  return rows;
}

// What a table of the core holds, by name.
StringDict table(const std::string& name) {
  if (name == "activations") return activations();
  FTBERT_CHECK(name == "formats", "table: expected activations or formats, got '", name, "'");
  return formats_table();
}

StringDict build_info() {
  StringDict info;
  const std::string why_not = why_no_cuda();
  const bool cuda = why_not.empty();
  info.insert("cuda", cuda ? "yes" : "no");
  if (!cuda) info.insert("cuda_reason", why_not);
  const std::string no_cpu = why_no_cpu_kernels();  // GPUs compute there all the same
  const char* int8 = no_cpu.empty() ? isa_kernels().int8 : nullptr;
  info.insert("cpu_isa", no_cpu.empty() ? std::string(cpu_isa()) : "none");
  if (!no_cpu.empty()) info.insert("cpu_reason", no_cpu);
  info.insert("cpu_isas", cpu_isas());
  info.insert("cpu_int8", int8 ? int8 : "none");
  info.insert("cpu_gemm", no_cpu.empty() ? torch_products_name() : "none");
  if (cuda) info.insert("cuda_gemm", gemm_library_version());
  return info;
}

// The members of Gpu, why it is held to a lesser one, or "", and kernels_on it.
std::tuple<c10::Dict<std::string, int64_t>, std::string, std::string> gpu(int64_t device) {
  FTBERT_CHECK(device >= 0 && device <= INT_MAX, "device: expected 0 to ", INT_MAX, ", got ", device);
  const int index = static_cast<int>(device);
  const Gpu found = cuda_context(index, nullptr);
  c10::Dict<std::string, int64_t> members;
  members.insert("capability", found.capability);
  members.insert("sm_count", found.sm_count);
  members.insert("device_capability", found.device_capability);
  members.insert("warpgroups", found.warpgroups);
  members.insert("shared_bytes", found.shared_bytes);
  members.insert("shared_bytes_of_sm", found.shared_bytes_of_sm);
  members.insert("l2_bytes", found.l2_bytes);
  members.insert("clock_khz", found.clock_khz);
  members.insert("bandwidth", static_cast<int64_t>(found.bandwidth));
  return {members, why_held(index), kernels_on(found)};
}

c10::Dict<std::string, bool> busy_cores_info() {
  c10::Dict<std::string, bool> info;
  for (const auto& [name, is] : busy_cores()) info.insert(name, is);
  return info;
}

// A GEMM operand in the layout that the encoder keeps, so that a loader need not hold both.
Tensor pack(const Tensor& weight) {
  plain("weight", weight);
  const at::ScalarType type = weight.scalar_type();
  const bool exact = weight.is_cpu() && (type == at::kFloat || type == at::kBFloat16);
  FTBERT_CHECK(weight.dim() == 2 && weight.numel() > 0 && (exact || type == at::kChar),
               "weight: expected float32 or bfloat16 [n, k] on the CPU, or int8, got ", describe(weight));
  return pack_weight(weight);
}

// The same of a matrix in q8_0, on any device.
Tensor pack_blocks(const Tensor& values, const Tensor& scales) {
  check_q8_0(values, scales);
  return pack_q8_0(values, scales);
}

// With those of one type as the other: Python's pickle has no storage of E4M3, and no weight is of bytes.
TensorDict viewed(const TensorDict& weights, at::ScalarType one, at::ScalarType other) {
  TensorDict all;
  for (const auto& entry : weights) {
    const Tensor tensor = entry.value();
    all.insert(entry.key(), !tensor.is_mkldnn() && tensor.scalar_type() == one ? tensor.view(other) : tensor);
  }
  return all;
}

}  // namespace

TORCH_LIBRARY(ftbert, m) {
  m.class_<EncoderClass>("Encoder")
      .def(torch::init<TensorDict, std::string, std::string>(), "",
           {torch::arg("weights"), torch::arg("config"), torch::arg("attention") = "auto"})
      .def("forward",
           [](const EncoderPtr& self, const Tensor& ids, const OptionalTensor& mask, const OptionalTensor& types) {
             const auto made = self->engine().forward(
                 {.input_ids = ids, .attention_mask = mask, .token_type_ids = types}, {Want::tokens, Want::pooled});
             return std::make_tuple(made[0], made[1]);
           },
           "",
           {torch::arg("input_ids"), torch::arg("attention_mask") = at::IValue(),
            torch::arg("token_type_ids") = at::IValue()})
      .def("forward_packed",
           [](const EncoderPtr& self, const Tensor& ids, const Tensor& cu, int64_t max_seqlen,
              const OptionalTensor& types) {
             const Call call{.input_ids = ids, .token_type_ids = types, .cu_seqlens = cu, .max_seqlen = max_seqlen};
             return self->engine().forward(call, {Want::tokens})[0];
           },
           "",
           {torch::arg("input_ids"), torch::arg("cu_seqlens"), torch::arg("max_seqlen"),
            torch::arg("token_type_ids") = at::IValue()})
      .def("forward_batch", &dispatch_forward_batch, "",
           {torch::arg("input_ids"), torch::arg("attention_mask"), torch::arg("token_type_ids"),
            torch::arg("cu_seqlens"), torch::arg("max_seqlen"), torch::arg("want"), torch::arg("rows") = at::IValue(),
            torch::arg("shared_prefix") = 0, torch::arg("keys") = at::IValue()})
      // One encoder over the ranks of this process, each with its shard.
      .def_static("tensor_parallel",
                  [](const c10::List<EncoderPtr>& shards) { return c10::make_intrusive<EncoderClass>(shards.vec()); })
      // One encoder over stages: all of a model, or with a process group this process's. config: of the whole model.
      .def_static(
          "pipeline_parallel",
          [](const c10::List<EncoderPtr>& stages, const std::string& config, const std::vector<int64_t>& first_layers,
             const TensorDict& shared, const std::string& process_group, const std::string& comparisons, bool contents,
             const std::string& model) {
            std::shared_ptr<const Processes> processes;
            if (!process_group.empty())
              processes = std::make_shared<const Processes>(
                  Processes{.group = process_group, .comparisons = comparisons, .contents = contents, .model = model});
            return c10::make_intrusive<EncoderClass>(Stages{.here = stages.vec(),
                                                            .config = config,
                                                            .first_layers = first_layers,
                                                            .processes = processes,
                                                            .shared = shared});
          })
      .def("join",
           [](const EncoderPtr& self, const std::string& process_group, const std::string& comparisons, bool contents,
              const std::string& model) {
             const Processes processes{
                 .group = process_group, .comparisons = comparisons, .contents = contents, .model = model};
             self->engine().join(join_process_group(processes, self->config().shard, self->device()));
           },
           "", {torch::arg("process_group"), torch::arg("comparisons"), torch::arg("contents"), torch::arg("model")})
      .def("whole", [](const EncoderPtr& self) { return self->whole(); })
      .def("weights", [](const EncoderPtr& self) { return self->weights(); })
      .def("config", [](const EncoderPtr& self) { return self->description(); })
      .def("use_cuda_graphs", [](const EncoderPtr& self, bool on) { self->engine().use_cuda_graphs(on); })
      .def("info", [](const EncoderPtr& self) { return self->info(); })
      // Of several ranks in this process.
      .def("seconds_of_sum", [](const EncoderPtr& self, int64_t rows) { return self->engine().seconds_of_sum(rows); },
           "", {torch::arg("rows")})
      .def("device", [](const EncoderPtr& self) { return self->device(); })
      .def("hidden", [](const EncoderPtr& self) { return self->config().hidden; })
      .def("has_pooler", [](const EncoderPtr& self) { return self->config().pooler; })
      .def("layers", [](const EncoderPtr& self) { return self->config().depth(); })
      // A tensor that kernels read as it lies, for heads that share it (a tied decoder).
      .def("weight", [](const EncoderPtr& self, const std::string& name) { return self->weight(name); })
      .def("dtype", [](const EncoderPtr& self) { return std::string(to_string(dtype_of(self->dtype()))); })
      .def("matrix_dtype", [](const EncoderPtr& self) { return self->matrix_dtype(); })
      .def("to", [](const EncoderPtr& self, at::Device device,
                    const std::string& dtype) { return self->to(device, scalar_type_of(parse_dtype(dtype))); })
      .def("__obj_flatten__",
           [](const EncoderPtr& self) {
             return std::make_tuple(
                 std::make_tuple(std::string("device"), self->device()),
                 std::make_tuple(std::string("dtype"), std::string(to_string(dtype_of(self->dtype())))),
                 std::make_tuple(std::string("hidden"), self->config().hidden),
                 std::make_tuple(std::string("layers"), self->config().depth()),
                 std::make_tuple(std::string("has_pooler"), self->config().pooler));
           })
      .def_pickle(
          [](const EncoderPtr& self) {
            const TensorDict weights = viewed(self->weights(), at::kFloat8_e4m3fn, at::kByte);
            return std::make_tuple(weights, self->description(), self->attention());
          },
          [](std::tuple<TensorDict, std::string, std::string> state) {
            const TensorDict weights = viewed(std::get<0>(state), at::kByte, at::kFloat8_e4m3fn);
            return c10::make_intrusive<EncoderClass>(weights, std::get<1>(state), std::get<2>(state));
          });

  m.class_<DecoderClass>("Decoder")
      .def(torch::init<EncoderPtr, Tensor, OptionalTensor, int64_t, int64_t, OptionalTensor>(), "",
           {torch::arg("encoder"), torch::arg("weight"), torch::arg("bias"), torch::arg("slots"),
            torch::arg("positions"), torch::arg("scale") = torch::arg::none()})
      .def("forward", &DecoderClass::forward, "",
           {torch::arg("input_ids"), torch::arg("cu_seqlens"), torch::arg("slots"), torch::arg("all_rows") = false})
      .def("with_cache", &DecoderClass::with_cache, "", {torch::arg("slots"), torch::arg("positions")})
      .def("lengths", &DecoderClass::lengths)
      .def("positions", &DecoderClass::positions)
      .def("recorded", &DecoderClass::recorded)
      .def("truncate", &DecoderClass::truncate, "", {torch::arg("slot"), torch::arg("length")})
      .def("copy_prefix", &DecoderClass::copy_prefix, "", {torch::arg("from"), torch::arg("to"), torch::arg("length")});

  // Calls record graphs of their own, with memory that outlives the call: inside a graph of torch.compile's there is
  // no room for that.
  define_op(m,
            "forward_batch(__torch__.torch.classes.ftbert.Encoder encoder, Tensor input_ids, Tensor? attention_mask, "
            "Tensor? token_type_ids, Tensor? cu_seqlens, SymInt max_seqlen, str[] want, Tensor? rows=None, "
            "int shared_prefix=0, Tensor? keys=None) -> Tensor[]",
            &forward_batch, {at::Tag::cudagraph_unsafe});

  m.def("read_config(str config) -> (str, (str, int[], bool, str)[])", &read_config);
  m.def("build_info() -> Dict(str, str)", &build_info);
  m.def("gpu(int device) -> (Dict(str, int), str, str)", &gpu);
  m.def("table(str name) -> Dict(str, str)", &table);
  m.def("follow_busy_cores(bool on, bool? crowded=None) -> bool", &follow_busy_cores);
  m.def("busy_cores() -> Dict(str, bool)", &busy_cores_info);
  define_op(m, "pack_weight(Tensor weight) -> Tensor", &pack);
  define_op(m, "pack_q8_0(Tensor values, Tensor scales) -> Tensor", &pack_blocks);
}

}  // namespace ftbert::binding
