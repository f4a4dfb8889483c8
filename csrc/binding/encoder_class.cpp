#include "binding/encoder_class.h"

#include <set>

#include "binding/tensors.h"
#include "binding/torch_products.h"

namespace ftbert::binding {

std::map<std::string, std::string> to_map(const StringDict& dict) {
  std::map<std::string, std::string> map;
  for (const auto& entry : dict) map[entry.key()] = entry.value();
  return map;
}

namespace {

std::optional<AttentionPath> parse_path(const std::string& name) {
  if (name == "auto") return std::nullopt;
  if (name == "fused") return AttentionPath::fused;
  FTBERT_CHECK(name == "general", "attention must be 'auto', 'fused' or 'general', got '", name, "'");
  return AttentionPath::general;
}

// As the matrices are stored: like all else, in bf16 on the CPU, or in a type that only matrices have. The first one
// tells; check_product_exists says whether there is a product for it.
at::ScalarType find_matrix_dtype(const std::vector<WeightSpec>& specs, const TensorDict& weights, at::Device device,
                                 at::ScalarType dtype) {
  for (const WeightSpec& spec : specs) {
    const auto it = weights.find(spec.name);
    if (!spec.matrix || it == weights.end()) continue;
    const at::ScalarType stored = it->value().scalar_type();
    const bool own = stored == at::kFloat8_e4m3fn || stored == at::kChar ||
                     (stored == at::kBFloat16 && device.is_cpu() && dtype == at::kFloat);
    return own ? stored : dtype;
  }
  return dtype;
}

// Every complaint at once: missing, misshapen, of another dtype or device, and left over.
void check_weights(const std::vector<WeightSpec>& specs, const TensorDict& weights, at::Device device,
                   at::ScalarType dtype, at::ScalarType matrix_dtype) {
  std::string complaints;
  std::set<std::string> known;
  for (const WeightSpec& spec : specs) {
    known.insert(spec.name);
    const auto it = weights.find(spec.name);
    if (it == weights.end()) {
      complaints += "\n  missing: " + spec.name + " " + shape_text(spec.shape);
      continue;
    }
    const at::Tensor tensor = it->value();
    const bool packed_here = device.is_cpu() && spec.matrix && tensor.is_mkldnn();
    if (!packed_here) plain(spec.name.c_str(), tensor);
    if (!has_shape(tensor, spec.shape))
      complaints += "\n  " + spec.name + ": expected " + shape_text(spec.shape) + ", got " + shape_text(tensor.sizes());
    if (tensor.dim() == 3 && tensor.scalar_type() != at::kFloat)
      complaints += "\n  " + spec.name + ": panels are Float, got " + at::toString(tensor.scalar_type());
    if (is_packed(tensor) && !(spec.matrix && device.is_cpu()))
      complaints += "\n  " + spec.name + ": only matrices on the CPU may be packed";
    const at::ScalarType expected = spec.matrix ? matrix_dtype : dtype;
    if (tensor.device() != device || tensor.scalar_type() != expected)
      complaints += "\n  " + spec.name + ": expected " + at::toString(expected) + " on " + device.str() + ", got " +
                    at::toString(tensor.scalar_type()) + " on " + tensor.device().str();
  }
  for (const auto& entry : weights)
    if (!known.count(entry.key())) complaints += "\n  extra: " + entry.key();
  FTBERT_CHECK(complaints.empty(), "the weights do not fit the configuration:", complaints);
}

}  // namespace

EncoderClass::EncoderClass(TensorDict weights, StringDict config, std::string attention)
    : entries_(config.copy()), attention_(std::move(attention)), config_(EncoderConfig::parse(to_map(config))) {
  const std::vector<WeightSpec> specs = weight_specs(config_);
  const auto word = weights.find("embeddings.word");
  FTBERT_CHECK(word != weights.end(), "the weights lack embeddings.word");
  device_ = word->value().device();
  plain("embeddings.word", word->value());
  dtype_ = word->value().scalar_type();
  const DeviceKind kind = device_kind(device_);
  const DType dtype = dtype_of(dtype_);
  matrix_dtype_ = find_matrix_dtype(specs, weights, device_, dtype_);
  check_weights(specs, weights, device_, dtype_, matrix_dtype_);
  const std::optional<AttentionPath> path = parse_path(attention_);

  dispatch(kind, dtype, [&]<class Device, class T>(Backend<Device, T>) {
    for (const WeightSpec& spec : specs) {
      const at::Tensor given = weights.at(spec.name).detach();
      // A loader may have packed it already, to not hold both layouts.
      if (spec.matrix && kind == DeviceKind::cpu)
        packed_[spec.name] = given.is_mkldnn() ? given : is_packed(given) ? given.contiguous() : pack_weight(given);
      else
        weights_.insert(spec.name, given.contiguous());
    }
    const Weights<T> bound = bind_weights<T>(config_, [&](const std::string& name) -> Matrix {
      const auto it = packed_.find(name);
      const DType stored = stored_dtype(matrix_dtype_);
      if (it != packed_.end()) return {.dtype = stored, .packed = &it->second};
      return {.data = data<T>(weights_.at(name)), .dtype = stored};
    });
    engine_ = make_engine<Device, T>(config_, bound, device_, path);
  });
}

TensorDict EncoderClass::weights() const {
  TensorDict all;
  for (const WeightSpec& spec : weight_specs(config_)) {
    const auto it = packed_.find(spec.name);
    all.insert(spec.name, it == packed_.end() ? weights_.at(spec.name) : unpack_weight(it->second, spec.shape[0]));
  }
  return all;
}

at::Tensor EncoderClass::weight(const std::string& name) const {
  const auto it = weights_.find(name);
  FTBERT_CHECK(it != weights_.end(), "no tensor of the model can be shared under the name '", name, "'");
  return it->value();
}

StringDict EncoderClass::info() const {
  StringDict all;
  all.insert("device", device_.str());
  all.insert("dtype", std::string(to_string(dtype_of(dtype_))));
  for (const auto& [key, value] : engine_->info()) all.insert(key, value);
  if (matrix_dtype_ == dtype_) return all;
  all.insert("products", std::string(to_string(stored_dtype(matrix_dtype_))));
  const int64_t head_size = config_.layers.empty() ? 0 : config_.layers.front().attention.heads.size;
  all.insert("attention_products",
             all.at("attention") == "fused" ? std::string(attention_products(head_size)) : std::string("fp32"));
  return all;
}

c10::intrusive_ptr<EncoderClass> EncoderClass::to(at::Device device, at::ScalarType dtype) const {
  TensorDict moved;
  const TensorDict all = weights();
  for (const WeightSpec& spec : weight_specs(config_)) {
    const bool stream = device.is_cpu() && dtype == at::kBFloat16 && !spec.matrix;  // it stays in float
    moved.insert(spec.name, all.at(spec.name).to(device, stream ? at::kFloat : dtype));
  }
  auto other = c10::make_intrusive<EncoderClass>(moved, entries_, attention_);
  other->engine().use_cuda_graphs(engine_->uses_cuda_graphs());
  return other;
}

}  // namespace ftbert::binding
