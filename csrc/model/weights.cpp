#include "model/weights.h"

#include <map>
#include <set>
#include <string_view>

namespace ftbert {
namespace {

constexpr auto kWordScales = "embeddings.word.scale";

template <class Visit>
void walk_norm(const std::string& name, const NormConfig& config, int64_t cols, const Visit& visit) {
  if (config.kind == NormKind::none) return;
  visit({name + ".weight", {cols}});
  if (config.bias) visit({name + ".bias", {cols}});
}

// Whether the other operand has one scale, known before the call.
bool has_one_input_scale(const Format& matrix) { return matrix.other->block == kWholeMatrix; }

template <class Visit>
void walk_linear(const std::string& name, int64_t n, int64_t k, bool bias, const Format* type, const Visit& visit) {
  const WeightSpec matrix{name + ".weight", {n, k}, true, type};
  visit(matrix);
  if (type) {
    const WeightScales scales = scales_of(matrix);
    const bool blocks = type->block > 0;
    visit(
        {scales.matrix, blocks ? std::vector{n, k / type->block} : std::vector{n}, false, &plain_format(type->scales)});
    if (type->other) visit({scales.input, {has_one_input_scale(*type) ? 1 : k}, false, &formats::fp32});
  }
  if (bias) visit({name + ".bias", {n}});
}

template <class Visit>
void walk_layer(const ModelConfig& c, const LayerConfig& l, const Visit& visit) {
  const std::string layer = layer_prefix(l);
  walk_linear(layer + "attention.qkv", l.attention.heads.qkv_width(), c.hidden, l.attention.qkv_bias,
              l.attention.qkv_type, visit);
  if (l.attention.qk_norm) {
    walk_norm(layer + "attention.q_norm", *l.attention.qk_norm, l.attention.heads.size, visit);
    walk_norm(layer + "attention.k_norm", *l.attention.qk_norm, l.attention.heads.size, visit);
  }
  if (l.attention.relative_bias && c.relative_of_layers)
    visit({layer + "attention.relative_bias", {c.relative_heads, 2 * c.relative_span - 1}});
  if (const auto& scores = l.attention.position_scores; scores && !scores->shared) {
    // No matrices of products: the tables are made once, at load, from whatever type the stream has.
    const auto own = [&](const std::string& name, bool there, bool bias) {
      if (there) visit({layer + name + ".weight", {l.attention.heads.width(), c.hidden}});
      if (there && bias) visit({layer + name + ".bias", {l.attention.heads.width()}});
    };
    own("attention.position_keys", scores->keys, scores->keys_bias);
    own("attention.position_queries", scores->queries, scores->queries_bias);
  }
  walk_linear(layer + "attention.out", c.hidden, l.attention.heads.width(), l.attention.out_bias, l.attention.out_type,
              visit);
  walk_norm(layer + "attention.norm", l.attention_norm, c.hidden, visit);
  walk_norm(layer + "attention.result_norm", l.attention_result_norm, c.hidden, visit);
  walk_linear(layer + "ffn.up", l.ffn.up_rows(), c.hidden, l.ffn.up_bias, l.ffn.up_type, visit);
  walk_linear(layer + "ffn.down", c.hidden, l.ffn.inter, l.ffn.down_bias, l.ffn.down_type, visit);
  walk_norm(layer + "ffn.norm", l.ffn_norm, c.hidden, visit);
  walk_norm(layer + "ffn.result_norm", l.ffn_result_norm, c.hidden, visit);
}

template <class Visit>
void walk_embeddings(const ModelConfig& c, const Visit& visit) {
  visit({"embeddings.word", {c.vocab, c.embedding}, false, c.word_type});
  if (c.word_type) visit({kWordScales, {c.vocab}, false, &formats::fp32});
  if (c.positions != PositionKind::none) visit({"embeddings.position", {c.max_positions, c.embedding}});
  if (c.token_types > 0) visit({"embeddings.token_type", {c.token_types, c.embedding}});
  walk_norm("embeddings.norm", c.embedding_norm, c.embedding, visit);
  if (c.embedding_projection) walk_linear("embeddings.projection", c.hidden, c.embedding, c.projection_bias, {}, visit);
  walk_norm("embeddings.projection_norm", c.projection_norm, c.hidden, visit);
  if (!c.convolution) return;
  walk_linear("convolution", c.hidden, c.convolution->kernel * c.hidden, true, {}, visit);
  walk_norm("convolution_norm", c.convolution->norm, c.hidden, visit);
}

// One walk over the model, used both to list the tensors and to bind them: the two cannot disagree.
template <class Visit>
void walk(const ModelConfig& c, const Visit& visit) {
  if (c.stage.first()) walk_embeddings(c, visit);
  if (c.relative_span > 0 && !c.relative_of_layers)
    visit({"attention.relative_bias", {c.relative_heads, 2 * c.relative_span - 1}});
  if (c.position_span > 0) {
    visit({"attention.positions", {2 * c.position_span, c.hidden}});
    walk_norm("attention.position_norm", c.position_norm, c.hidden, visit);
  }
  std::set<int64_t> seen;
  for (const LayerConfig& l : c.layers)
    if (seen.insert(l.weights_of).second) walk_layer(c, l, visit);
  walk_norm("final_norm", c.final_norm, c.hidden, visit);
  if (c.pooler) walk_linear("pooler", c.hidden, c.hidden, true, {}, visit);
}

auto into(std::vector<WeightSpec>& specs) {
  return [&specs](WeightSpec spec) { specs.push_back(std::move(spec)); };
}

}  // namespace

std::string layer_prefix(const LayerConfig& layer) { return "layers." + std::to_string(layer.weights_of) + "."; }

WeightScales scales_of(const WeightSpec& matrix) {
  const std::string& name = matrix.name;
  const std::string input = name.substr(0, name.size() - std::string_view("weight").size()) + "input.";
  if (!matrix.type->other) return {name + ".scale", ""};
  return {name + ".scale", input + (has_one_input_scale(*matrix.type) ? "scale" : "smooth")};
}

std::vector<WeightSpec> weight_specs(const ModelConfig& config) {
  std::vector<WeightSpec> specs;
  walk(config, into(specs));
  return specs;
}

std::vector<WeightSpec> layer_weight_specs(const ModelConfig& config, const LayerConfig& layer) {
  std::vector<WeightSpec> specs;
  walk_layer(config, layer, into(specs));
  return specs;
}

template <class T>
Weights<T> bind_weights(const ModelConfig& config, const WeightSource& source) {
  std::map<std::string, Matrix> found;
  walk(config, [&](const WeightSpec& spec) {
    Matrix& tensor = found[spec.name] = source(spec.name);
    tensor.n = spec.shape.front();
    tensor.k = spec.shape.back();
  });
  const auto matrix = [&](const std::string& name) {
    const auto it = found.find(name);
    return it == found.end() ? Matrix() : it->second;
  };
  const auto data = [&](const std::string& name) { return static_cast<const T*>(matrix(name).data); };
  const auto norm = [&](const std::string& name, const NormConfig& n) {
    return Norm<T>{.kind = n.kind,
                   .gamma = data(name + ".weight"),
                   .beta = data(name + ".bias"),
                   .eps = static_cast<float>(n.eps),
                   .offset = static_cast<float>(n.offset),
                   .rounding = n.rounding};
  };
  const auto linear = [&](const std::string& name, const Shard& shard = {}) {
    Linear<T> made{};
    made.weight = matrix(name + ".weight"), made.bias = data(name + ".bias"), made.shard = shard;
    const WeightScales names = scales_of({name + ".weight", {}, true, made.weight.format});
    made.weight.scale = matrix(names.matrix).data;
    made.input = static_cast<const float*>(matrix(names.input).data);
    return made;
  };
  const auto norms = [&](const std::string& block, NormPlace place, const NormConfig& of_block,
                         const NormConfig& of_result) {
    const Norm<T> outer = norm(block + ".norm", of_block), result = norm(block + ".result_norm", of_result);
    return place == NormPlace::pre ? BlockNorms<T>{outer, result, {}} : BlockNorms<T>{{}, result, outer};
  };
  Weights<T> w;
  w.word = Operand::of(data("embeddings.word"));
  if (config.word_type) {
    w.word.format = config.word_type;
    w.word.scale = static_cast<const float*>(matrix(kWordScales).data);
  }
  w.position = data("embeddings.position");
  w.token_type = data("embeddings.token_type");
  w.embedding_norm = norm("embeddings.norm", config.embedding_norm);
  w.embedding_projection = linear("embeddings.projection");
  w.convolution = linear("convolution");
  w.convolution_norm = norm("convolution_norm", config.convolution.value_or(Convolution()).norm);
  w.projection_norm = norm("embeddings.projection_norm", config.projection_norm);
  for (const LayerConfig& c : config.layers) {
    const std::string layer = layer_prefix(c);
    const std::string relative_bias = (config.relative_of_layers ? layer : "") + "attention.relative_bias";
    const NormConfig qk_norm = c.attention.qk_norm.value_or(NormConfig());
    w.layers.push_back(
        {.config = c,
         .index = static_cast<int64_t>(w.layers.size()),
         .qkv = linear(layer + "attention.qkv"),
         .q_norm = norm(layer + "attention.q_norm", qk_norm),
         .k_norm = norm(layer + "attention.k_norm", qk_norm),
         .rotation = {},
         .relative_bias = c.attention.relative_bias ? data(relative_bias) : nullptr,
         .relative_span = c.attention.relative_bias ? config.relative_span : 0,
         .position_keys = linear(layer + "attention.position_keys"),
         .position_queries = linear(layer + "attention.position_queries"),
         .positions = {},
         .out = linear(layer + "attention.out", config.shard),
         .attention_norms = norms(layer + "attention", c.norm_place, c.attention_norm, c.attention_result_norm),
         .up = linear(layer + "ffn.up"),
         .down = linear(layer + "ffn.down", config.shard),
         .ffn_norms = norms(layer + "ffn", c.norm_place, c.ffn_norm, c.ffn_result_norm)});
  }
  w.positions = data("attention.positions");
  w.position_norm = norm("attention.position_norm", config.position_norm);
  w.final_norm = norm("final_norm", config.final_norm);
  w.pooler = linear("pooler");
  return w;
}

template Weights<float> bind_weights(const ModelConfig&, const WeightSource&);
template Weights<half_t> bind_weights(const ModelConfig&, const WeightSource&);
template Weights<bfloat16_t> bind_weights(const ModelConfig&, const WeightSource&);

}  // namespace ftbert
