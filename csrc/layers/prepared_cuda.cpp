// Which models and calls have norms that products do, and the vectors for them.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "core/check.h"
#include "core/dispatch.h"
#include "gemm/gemm.h"
#include "gemm/gpu/deferred_norm.h"
#include "gemm/gpu/own.h"
#include "layers/prepared.h"

namespace ftbert {

namespace {

constexpr int64_t kMostDeferred = 1024;

// By $FTBERT_DEFERRED_NORM; none: it is not set.
std::optional<int64_t> asked_deferred_tokens() {
  const char* value = std::getenv("FTBERT_DEFERRED_NORM");
  if (!value) return {};
  const std::string_view words = value;
  if (words == "on") return kMostDeferred;
  if (words == "off") return 0;
  FTBERT_CHECK(!words.empty() && words.size() < 10 && words.find_first_not_of("0123456789") == words.npos,
               "FTBERT_DEFERRED_NORM is \"", words,
               "\"; expected off, on, or up to how many tokens LayerNorms are deferred");
  return std::atoll(value);
}

// Up to how many tokens norms are deferred by moments, from which on norm kernels are faster.
int64_t most_deferred_tokens() { return asked_deferred_tokens().value_or(kMostDeferred); }

template <class T>
bool in_e4m3(const Linear<T>& linear) {
  return linear.weight.format == &formats::e4m3;
}
template <class T>
bool any_in_e4m3(const Layer<T>& layer) {
  return in_e4m3(layer.qkv) || in_e4m3(layer.out) || in_e4m3(layer.up) || in_e4m3(layer.down);
}

// What the first layer's stream was normed by.
template <class T>
const Norm<T>& norm_ahead(const Weights<T>& weights) {
  return weights.embedding_projection.weight.n > 0 ? weights.projection_norm : weights.embedding_norm;
}

// Of a layer whose norms are deferred by moments: qkv, out, up, down.
template <class T>
std::array<Product, 4> deferring_products(const Layer<T>& layer, int64_t rows) {
  const After after = layer.config.norm_place == NormPlace::pre ? After::moments_beside : After::moments;
  const FeedForwardConfig& ffn = layer.config.ffn;
  const Gate gate = ffn.gated ? Gate::pairs : Gate::none;
  const Epilogue ahead{.bias = true, .residual = true, .after = after};
  const auto product = [&](const Linear<T>& linear, DType c, const Epilogue& epilogue) {
    return product_of(linear, rows, wished_by<T>(linear, nullptr), c, epilogue);
  };
  std::array products{product(layer.qkv, kDType<T>, {.bias = true}), product(layer.out, kDType<T>, ahead),
                      product(layer.up, in_e4m3(layer.up) && in_e4m3(layer.down) ? DType::e4m3 : kDType<T>,
                              {.bias = true, .activation = ffn.activation, .gate = gate}),
                      product(layer.down, kDType<T>, ahead)};
  products[0].before = products[2].before = Before::norm_by_moments;
  return products;
}

// Why the norms of a layer cannot be deferred, or "". first: it is the model's first.
template <class T>
std::string refusal(const Layer<T>& layer, bool first) {
  const BlockNorms<T>&of_attention = layer.attention_norms, &of_ffn = layer.ffn_norms;
  if (of_attention.result || of_ffn.result) return "a block's result has a norm of its own";
  if (layer.config.norm_place == NormPlace::pre)
    return (of_attention.before || first) && of_ffn.before ? "" : "a block has no norm before it";
  for (const BlockNorms<T>* norms : {&of_attention, &of_ffn})
    if (!norms->after.is_layernorm_with_beta()) return "a norm is no LayerNorm with gamma and beta";
  return "";
}

// Products are chosen for one layer and run in all whose matrices are stored alike.
bool differ(const LayerConfig& one, const LayerConfig& other) {
  return one.attention.heads.width() != other.attention.heads.width() ||
         one.attention.heads.kv_width() != other.attention.heads.kv_width() || one.ffn.inter != other.ffn.inter ||
         one.ffn.activation != other.ffn.activation || one.ffn.gated != other.ffn.gated ||
         one.norm_place != other.norm_place;
}

template <class T>
std::string refusal(const Context<Cuda>& context, const ModelConfig& c, const Weights<T>& weights, AttentionPath path) {
  if (path != AttentionPath::fused || c.by_distance()) return "attention has a bias or takes the general path";
  if (c.convolution) return "a convolution stands beside the first layer";
  if (most_deferred_tokens() == 0) return "switched off";
  if (c.layers.empty()) return "there are no layers";
  if (!c.shard.whole()) return "products are parts of sums over several ranks";
  for (const Layer<T>& layer : weights.layers)
    if (const std::string why_not = refusal(layer, &layer == &weights.layers.front()); !why_not.empty()) return why_not;
  const LayerConfig& first = c.layers.front();
  if (first.norm_place == NormPlace::post && weights.final_norm) return "a norm follows the last layer's";
  const bool scaled = std::any_of(weights.layers.begin(), weights.layers.end(), any_in_e4m3<T>);
  if (scaled && first.norm_place == NormPlace::pre) return "sums that no norm precedes have no known scale in e4m3";
  if (scaled && !norm_ahead(weights).is_layernorm_with_beta())
    return "no LayerNorm with gamma and beta precedes the first layer";
  if (c.hidden > kMostColumns) return "hidden is more than " + std::to_string(kMostColumns);
  for (const LayerConfig& layer : c.layers)
    if (differ(layer, first)) return "its layers differ";
  for (const Layer<T>& layer : weights.layers) {
    if (c.hidden % 8 != 0 || layer.config.attention.heads.width() % 8 != 0 || layer.config.ffn.inter % 8 != 0)
      return "hidden and inter must be multiples of 8";
    for (const Linear<T>* linear : {&layer.qkv, &layer.out, &layer.up, &layer.down}) {
      const Matrix& weight = linear->weight;
      if (weight.format != kFormat<T> && !in_e4m3(*linear))
        return "a matrix is stored as " + std::string(weight.format->name);
      for (const void* pointer : {weight.data, static_cast<const void*>(linear->bias)})
        if (!weight.data || reinterpret_cast<uintptr_t>(pointer) % 16 != 0)
          return "a weight is missing or does not begin at 16 bytes";
    }
  }
  if (!has_kernel(context, deferring_products(weights.layers.front(), 1).front()))
    return "this GPU and this build have no kernel for products behind them";
  return "";
}

// As few_rows reads its vectors: 16 bytes at a time.
bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Up to how many rows of a call with a cache the products of all layers take the norms before them and the sums behind.
template <class T>
int64_t most_by_reader(const Context<Cuda>& context, const ModelConfig& config, const Weights<T>& weights,
                       AttentionPath path) {
  if (path != AttentionPath::fused || weights.layers.empty() || most_deferred_tokens() == 0) return 0;
  if (!config.shard.whole()) return 0;  // a part of a sum is no result to add to the stream
  const auto is_read = [](const Norm<T>& norm) { return norm.gamma && aligned(norm.gamma) && aligned(norm.beta); };
  const auto has_product = [&](const Linear<T>& linear, Before before, int64_t rows) {
    Product product = product_of(linear, rows, {.bias = true, .residual = before == Before::nothing});
    product.before = before;
    return linear.weight.data && !linear.input && aligned(linear.weight.data) && aligned(linear.bias) &&
           has_kernel(context, product);
  };
  int64_t most = kMostFewRows;
  for (const Layer<T>& layer : weights.layers) {
    const BlockNorms<T>&of_attention = layer.attention_norms, &of_ffn = layer.ffn_norms;
    const bool first = &layer == &weights.layers.front();
    if (layer.config.norm_place != NormPlace::pre || of_attention.result || of_ffn.result ||
        !(of_attention.before ? is_read(of_attention.before) : first) || !of_ffn.before || !is_read(of_ffn.before))
      return 0;
    while (most > 0 &&
           !(has_product(layer.qkv, Before::norm_rows, most) && has_product(layer.out, Before::nothing, most) &&
             has_product(layer.up, Before::norm_rows, most) && has_product(layer.down, Before::nothing, most)))
      --most;
  }
  return most;
}

// The vectors of all products.
template <class T>
void set_vectors(const Context<Cuda>& context, Weights<T>& weights, const AllocateFloats& allocate) {
  const bool keep_sum = weights.layers.front().config.norm_place == NormPlace::pre;
  const auto scales = [&](const Linear<T>& linear, const float* input) -> const float* {
    if (!in_e4m3(linear)) return nullptr;
    float* const made = allocate(linear.weight.n);
    make_product_scales(context, linear.weight, input, made);
    return made;
  };
  // left: by the sum on which a norm is pending; beta: of that norm.
  const auto correction = [&](const Linear<T>& linear, const SumVectors& left, const T* beta) {
    const Matrix& w = linear.weight;
    float *const add = allocate(w.n), *const slope = allocate(w.n);
    make_correction_vectors(context, kDType<T>, w, linear.bias, left.gamma, beta, add, slope);
    return CorrectionVectors{add, slope, scales(linear, left.copy_scale ? left.copy_scale : linear.input)};
  };
  // pending: on the residual; next: the one that follows, for the product `reader`, nullptr: nobody.
  const auto sum = [&](const Linear<T>& linear, const Norm<T>& pending, const Norm<T>& next, const Linear<T>* reader) {
    const int64_t n = linear.weight.n;
    float *const add = allocate(n), *const gamma = allocate(n), *const unscale = allocate(1);
    make_sum_vectors(context, kDType<T>, linear.bias, keep_sum ? nullptr : pending.beta, next.gamma, next.offset,
                     keep_sum, n, add, gamma, unscale);
    SumVectors made{.add = add, .gamma = gamma, .scale = scales(linear, linear.input), .unscale = unscale};
    if (reader && in_e4m3(*reader)) {
      float* const scale = allocate(1);
      const Norm<T>& of_residual = pending ? pending : norm_ahead(weights);
      make_copy_scale(context, kDType<T>, of_residual.gamma, of_residual.beta, linear.weight, linear.input,
                      reader->input, unscale, scale);
      made.copy_scale = scale;
    }
    return made;
  };
  const Norm<T> kernel;  // what follows the last sum
  SumVectors left{};
  Norm<T> pending;
  for (size_t i = 0; i < weights.layers.size(); ++i) {
    Layer<T>& layer = weights.layers[i];
    const bool last = i + 1 == weights.layers.size();
    const Norm<T>& behind_attention = keep_sum ? layer.ffn_norms.before : layer.attention_norms.after;
    const Norm<T>& behind_ffn = !keep_sum ? layer.ffn_norms.after
                                : last    ? kernel
                                          : weights.layers[i + 1].attention_norms.before;
    layer.qkv.behind_norm = correction(layer.qkv, left, pending.beta);
    layer.out.ahead_of_norm = sum(layer.out, pending, behind_attention, &layer.up);
    layer.up.behind_norm = correction(layer.up, layer.out.ahead_of_norm, behind_attention.beta);
    layer.down.ahead_of_norm =
        sum(layer.down, behind_attention, behind_ffn, last ? nullptr : &weights.layers[i + 1].qkv);
    layer.down.unread = sum(layer.down, behind_attention, kernel, nullptr);
    left = layer.down.ahead_of_norm, pending = behind_ffn;
  }
}

template <class T>
bool by_moments(const Context<Cuda>& context, const DeferralLimits& limits, const Weights<T>& weights, int64_t tokens) {
  if (tokens == 0 || tokens > limits.by_moments) return false;
  const int64_t rows = gemm_rows(context, tokens);
  if (!limits.pays.empty() && !limits.pays[rows]) return false;
  return std::all_of(limits.kinds.begin(), limits.kinds.end(), [&](size_t i) {
    const Layer<T>& layer = weights.layers[i];
    const auto [qkv, out, up, down] = deferring_products(layer, rows);
    return is_one_kernel(context, layer.qkv, qkv) && is_one_kernel(context, layer.out, out) &&
           is_one_kernel(context, layer.up, up) && is_one_kernel(context, layer.down, down);
  });
}

// The first of each kind of layers whose matrices are stored alike.
template <class T>
std::vector<size_t> kinds_of(const std::vector<Layer<T>>& layers) {
  std::vector<size_t> kinds;
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto products = deferring_products(layers[i], 1);
    if (std::none_of(kinds.begin(), kinds.end(),
                     [&](size_t k) { return deferring_products(layers[k], 1) == products; }))
      kinds.push_back(i);
  }
  return kinds;
}

// For each number of rows that calls of up to `tokens` tokens have: whether deferring is guessed to pay.
template <class T>
std::vector<bool> deferring_pays_by_rows(const Context<Cuda>& context, const std::vector<Layer<T>>& layers,
                                         int64_t tokens) {
  std::vector<bool> pays(gemm_rows(context, tokens) + 1);
  for (int64_t most = 1; most <= tokens; most = gemm_rows(context, most) + 1) {
    const int64_t rows = gemm_rows(context, most);
    std::vector<Product> products;
    for (const Layer<T>& layer : layers)
      for (const Product& product : deferring_products(layer, rows)) products.push_back(product);
    pays[rows] = deferring_pays(context, products);
  }
  return pays;
}

}  // namespace

template <class T>
DeferralLimits prepare(const Context<Cuda>& context, const ModelConfig& config, Weights<T>& weights, AttentionPath path,
                       const AllocateFloats& allocate) {
  DeferralLimits limits;
  if constexpr (sizeof(T) == 2) {
    limits.by_reader = most_by_reader(context, config, weights, path);
    if (!allocate) return limits;
    limits.refusal = refusal(context, config, weights, path);
    if (!limits.refusal.empty()) return limits;
    limits.by_moments = most_deferred_tokens();
    limits.kinds = kinds_of(weights.layers);
    if (!asked_deferred_tokens()) limits.pays = deferring_pays_by_rows(context, weights.layers, limits.by_moments);
    set_vectors(context, weights, allocate);
  }
  return limits;
}

template <class T>
NormedBy normed_by(const Context<Cuda>& context, const DeferralLimits& limits, const Weights<T>& weights,
                   int64_t tokens, bool cached) {
  if (cached && tokens <= limits.by_reader) return NormedBy::reader;
  return by_moments(context, limits, weights, tokens) ? NormedBy::moments : NormedBy::kernels;
}

template <class T>
std::string deferred_state(const Context<Cuda>& context, const DeferralLimits& limits, const Weights<T>& weights) {
  if (!limits.refusal.empty()) return "no: " + limits.refusal;
  const int64_t most = limits.by_moments;
  std::string all;
  for (int64_t tokens = 1, first = 0; tokens <= most;) {
    const int64_t last = std::min(gemm_rows(context, tokens), most);
    const bool taken = by_moments(context, limits, weights, tokens);
    if (taken && !first) first = tokens;
    if (first && (!taken || last == most)) {
      all += (all.empty() ? "" : ", ") + std::to_string(first) + " to " + std::to_string(taken ? last : tokens - 1);
      first = 0;
    }
    tokens = last + 1;
  }
  return all.empty() ? "no: no number of tokens has all four products of a layer from kernels that defer norms"
                     : "of " + all + " tokens";
}

#define FTBERT_INSTANTIATE(T)                                                                                 \
  template DeferralLimits prepare(const Context<Cuda>&, const ModelConfig&, Weights<T>&, AttentionPath,       \
                                  const AllocateFloats&);                                                     \
  template NormedBy normed_by(const Context<Cuda>&, const DeferralLimits&, const Weights<T>&, int64_t, bool); \
  template std::string deferred_state(const Context<Cuda>&, const DeferralLimits&, const Weights<T>&);
FTBERT_CUDA_TYPES(FTBERT_INSTANTIATE)

}  // namespace ftbert
