#include "binding/encoder_class.h"

#include <algorithm>
#include <set>

#include "binding/engine.h"
#include "binding/packed_weight.h"
#include "binding/q8_0.h"
#include "binding/tensors.h"
#include "layers/layer_stack.h"

namespace ftbert::binding {
namespace {

std::optional<AttentionPath> parse_path(const std::string& name) {
  if (name == "auto") return std::nullopt;
  if (name == "fused") return AttentionPath::fused;
  FTBERT_CHECK(name == "general", "attention must be 'auto', 'fused' or 'general', got '", name, "'");
  return AttentionPath::general;
}

// Which tensor says where the model is and of which type its stream: the first in such a type that is no matrix.
at::Tensor find_stream(const std::vector<WeightSpec>& specs, const TensorDict& weights) {
  for (const WeightSpec& spec : specs) {
    const auto it = weights.find(spec.name);
    if (spec.matrix || spec.type || it == weights.end()) continue;
    const at::Tensor tensor = it->value();
    plain(spec.name.c_str(), tensor);
    if (is_element(tensor.scalar_type())) return tensor;
  }
  fail("the weights have no tensor in float32, float16 or bfloat16 beside the matrices; expected ", specs.front().name);
}

// The data of a tensor of that name, nullptr where there is none.
const void* data_of(const TensorDict& weights, const std::string& name) {
  const auto it = weights.find(name);
  return it == weights.end() ? nullptr : data<void>(it->value());
}

// How a matrix is stored, given as this tensor; Error for a type that a matrix is stored in with scales alone.
const Format* format_of(const WeightSpec& matrix, const at::Tensor& tensor) {
  return matrix.type ? matrix.type : &stored_format(tensor.scalar_type());
}

// Whether it is packed together with its scales.
bool has_blocks(const WeightSpec& spec) { return spec.matrix && spec.type && spec.type->block > 0; }

// Why no product takes the matrix of this name, or "".
std::string why_not_computed(const at::Device& device, DType stream, const WeightSpec& spec,
                             const TensorDict& weights) {
  try {
    Matrix matrix{.format = format_of(spec, weights.at(spec.name)), .n = spec.shape[0], .k = spec.shape[1]};
    const void* input = nullptr;
    if (spec.type) {
      const WeightScales names = scales_of(spec);
      if (!spec.type->inside) matrix.scale = data_of(weights, names.matrix);
      input = data_of(weights, names.input);
    }
    const Gpu gpu = device.is_cuda() ? cuda_context(device.index(), nullptr) : Context<Cuda>();
    check_product_exists(device_kind(device), gpu, stream, matrix, static_cast<const float*>(input));
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

// Names of the tensors of scales that there are none of, since they lie in packed matrices.
std::set<std::string> packed_scales(const std::vector<WeightSpec>& specs, const TensorDict& weights) {
  std::set<std::string> names;
  for (const WeightSpec& spec : specs) {
    const auto it = weights.find(spec.name);
    if (has_blocks(spec) && it != weights.end() && at::Tensor(it->value()).scalar_type() == at::kByte)
      names.insert(scales_of(spec).matrix);
  }
  return names;
}

// Every complaint at once: missing, misshapen, of another dtype or device, and left over.
void check_weights(const std::vector<WeightSpec>& specs, const TensorDict& weights, const at::Tensor& stream) {
  const at::Device device = stream.device();
  const DType dtype = dtype_of(stream.scalar_type());
  std::string complaints;
  std::set<std::string> known;
  const std::set<std::string> no_tensors = packed_scales(specs, weights);
  std::map<std::string, std::vector<std::string>> uncomputed;  // matrices, by the reason
  for (const WeightSpec& spec : specs) {
    const auto complain = [&](const std::string& words) { complaints += "\n  " + spec.name + ": " + words; };
    if (no_tensors.count(spec.name)) continue;
    known.insert(spec.name);
    const auto it = weights.find(spec.name);
    if (it == weights.end()) {
      complaints += "\n  missing: " + spec.name + " " + shape_text(spec.shape);
      continue;
    }
    const at::Tensor tensor = it->value();
    const bool packed_here = device.is_cpu() && spec.matrix && tensor.is_mkldnn();
    if (!packed_here) plain(spec.name.c_str(), tensor);
    const bool blocks = has_blocks(spec) && is_packed_q8_0(tensor, spec.shape);
    if (!blocks && !has_shape(tensor, spec.shape))
      complain("expected " + shape_text(spec.shape) + ", got " + shape_text(tensor.sizes()));
    const bool panels = spec.matrix && spec.type == &formats::int8 && tensor.scalar_type() == at::kByte;
    const at::ScalarType expected = spec.type ? scalar_type_of(spec.type->numbers) : stream.scalar_type();
    const bool any = spec.matrix && !spec.type;  // of the types that a product takes
    if (tensor.device() != device || (!any && !panels && !blocks && tensor.scalar_type() != expected))
      complain(std::string("expected ") + at::toString(expected) + " on " + device.str() + ", got " +
               at::toString(tensor.scalar_type()) + " on " + tensor.device().str());
    else if (const std::string why = spec.matrix ? why_not_computed(device, dtype, spec, weights) : ""; !why.empty())
      uncomputed[why].push_back(spec.name);
  }
  for (const auto& [why, names] : uncomputed)
    complaints += "\n  " + names.front() +
                  (names.size() > 1 ? " and " + std::to_string(names.size() - 1) + " more: " : ": ") + why;
  for (const auto& entry : weights)
    if (!known.count(entry.key())) complaints += "\n  extra: " + entry.key();
  FTBERT_CHECK(complaints.empty(), "the weights do not fit the configuration:", complaints);
}

}  // namespace

EncoderClass::EncoderClass(TensorDict weights, std::string config, std::string attention)
    : description_(std::move(config)), attention_(std::move(attention)), config_(ModelConfig::parse(description_)) {
  check_layers_exist(config_);
  const std::vector<WeightSpec> specs = weight_specs(config_);
  const at::Tensor stream = find_stream(specs, weights);
  device_ = stream.device();
  dtype_ = stream.scalar_type();
  const DeviceKind kind = device_kind(device_);
  const DType dtype = dtype_of(dtype_);
  check_weights(specs, weights, stream);
  const std::optional<AttentionPath> path = parse_path(attention_);

  dispatch(kind, dtype, [&]<class Device, class T>(Backend<Device, T>) {
    std::set<std::string> in_blocks;  // scales; the tensors follow their matrices
    for (const WeightSpec& spec : specs) {
      if (const auto it = weights.find(spec.name); it == weights.end() || in_blocks.count(spec.name)) continue;
      const at::Tensor given = weights.at(spec.name).detach();
      if (spec.matrix) matrix_formats_[spec.name] = format_of(spec, given);
      // A loader may have packed it already, to not hold both layouts.
      if (has_blocks(spec)) {
        const std::string scales = scales_of(spec).matrix;
        in_blocks.insert(scales);
        packed_[spec.name] =
            given.scalar_type() == at::kByte ? given.contiguous() : pack_q8_0(given, weights.at(scales));
      } else if (spec.matrix && is_packed_on(device_, *matrix_formats_.at(spec.name)))
        packed_[spec.name] = given.is_mkldnn() ? given : is_packed(given) ? given.contiguous() : pack_weight(given);
      else
        weights_.insert(spec.name, given.contiguous());
    }
    const Weights<T> bound = bind_weights<T>(config_, [&](const std::string& name) -> Matrix {
      const auto stored = matrix_formats_.find(name);
      const Format* format = stored == matrix_formats_.end() ? kFormat<T> : stored->second;
      const auto it = packed_.find(name);
      if (it != packed_.end()) return weight_matrix(*format, it->second, 0, 0);
      return {.data = data_of(weights_, name), .format = format};
    });
    engine_ = std::make_unique<Engine>(make_forward<Device, T>(config_, bound, device_, path));
  });
}

EncoderClass::EncoderClass(std::vector<EncoderPtr> shards) : engine_(std::make_unique<Engine>(std::move(shards))) {
  const EncoderClass& first = *engine_->members().front();
  weights_ = first.weights_, matrix_formats_ = first.matrix_formats_;
  description_ = first.description_, attention_ = first.attention_, config_ = first.config_;
  device_ = first.device_, dtype_ = first.dtype_;
}

EncoderClass::EncoderClass(const Stages& stages)
    : weights_(stages.shared), description_(stages.config), config_(ModelConfig::parse(description_)) {
  FTBERT_CHECK(!stages.here.empty(), "expected at least one stage");
  const EncoderClass& first = *stages.here.front();
  attention_ = first.attention_, device_ = first.device_, dtype_ = first.dtype_;
  for (const auto& stage : stages.here)
    matrix_formats_.insert(stage->matrix_formats_.begin(), stage->matrix_formats_.end());
  engine_ = std::make_unique<Engine>(stages, config_);
}

EncoderClass::~EncoderClass() = default;

bool EncoderClass::whole() const {
  return engine_->members().empty() && config_.shard.whole() && config_.stage.whole();
}

TensorDict EncoderClass::weights() const {
  FTBERT_CHECK(whole(), "the weights of this model lie on several devices, as ",
               config_.shard.whole() ? "stages" : "shards", ": load it on one to save or move it");
  TensorDict all;
  for (const WeightSpec& spec : weight_specs(config_)) {
    const auto it = packed_.find(spec.name);
    if (it != packed_.end() && has_blocks(spec)) {
      const auto [values, scales] = unpack_q8_0(it->second, spec.shape);
      all.insert(spec.name, values);
      all.insert(scales_of(spec).matrix, scales);
    } else if (it != packed_.end()) {
      all.insert(spec.name, unpack_weight(it->second, spec.shape));
    } else if (const auto plain = weights_.find(spec.name); plain != weights_.end()) {
      all.insert(spec.name, plain->value());
    }
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
  std::map<std::string, int64_t> stored;  // matrices, by the name of their type
  for (const auto& [name, format] : matrix_formats_) ++stored[std::string(format->name)];
  const std::string stream(to_string(dtype_of(dtype_)));
  if (stored.empty() || (stored.size() == 1 && stored.begin()->first == stream)) return all;
  std::string products;
  for (const auto& [dtype, matrices] : stored)
    products += (products.empty() ? "" : ", ") + dtype + (stored.size() > 1 ? " " + std::to_string(matrices) : "");
  all.insert("products", products);
  if (!device_.is_cpu()) return all;  // attention's own products are of the stream's type
  std::set<std::string> attention;
  for (const LayerConfig& layer : config_.layers) {
    const auto qkv = matrix_formats_.find(layer_prefix(layer) + "attention.qkv.weight");
    if (qkv == matrix_formats_.end()) continue;  // another process's
    const bool narrow = all.at("attention") == "fused" && !layer.attention.position_scores &&
                        attention_operand<Cpu, float>(*qkv->second) != DType::fp32;
    attention.insert(narrow ? attention_products(layer.attention.heads.size) : "fp32");
  }
  std::string words;
  for (const std::string& one : attention) words += (words.empty() ? "" : "; ") + one;
  all.insert("attention_products", words);
  return all;
}

std::string EncoderClass::matrix_dtype() const {
  const auto narrower = [](const auto& a, const auto& b) { return a.second->bits < b.second->bits; };
  const auto found = std::min_element(matrix_formats_.begin(), matrix_formats_.end(), narrower);
  return std::string(found == matrix_formats_.end() ? to_string(dtype_of(dtype_)) : found->second->name);
}

c10::intrusive_ptr<EncoderClass> EncoderClass::to(at::Device device, at::ScalarType dtype) const {
  TensorDict moved;
  const TensorDict all = weights();
  for (const WeightSpec& spec : weight_specs(config_)) {
    const bool stream = device.is_cpu() && dtype == at::kBFloat16 && !spec.matrix;  // it stays in float
    moved.insert(spec.name, all.at(spec.name).to(device, spec.type ? scalar_type_of(spec.type->numbers)
                                                         : stream  ? at::kFloat
                                                                   : dtype));
  }
  auto other = c10::make_intrusive<EncoderClass>(moved, description_, attention_);
  other->engine().use_cuda_graphs(engine_->uses_cuda_graphs());
  return other;
}

}  // namespace ftbert::binding
