// The order of a folded layer's kernels, and who hands what to whom.
#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "core/check.h"
#include "core/device_guard.h"
#include "gemm/gemm.h"
#include "gemm/own/deferred_norm.h"
#include "kernels/kernels.h"
#include "layers/deferred_norm.h"

namespace ftbert {
namespace {

// $FTBERT_FOLDED_NORM: "off", "on", or another number.
int64_t most_tokens_by_default() {
  const char* value = std::getenv("FTBERT_FOLDED_NORM");
  if (!value || std::string_view(value) == "on") return 1024;
  const std::string_view words = value;
  if (words == "off") return 0;
  FTBERT_CHECK(!words.empty() && words.size() < 10 && words.find_first_not_of("0123456789") == words.npos,
               "FTBERT_FOLDED_NORM is \"", words,
               "\"; expected off, on, or up to how many tokens LayerNorms are folded");
  return std::atoll(value);
}

constexpr int64_t kAlone = 4;  // floats that one takes, so that all begins at 16 bytes

}  // namespace

template <class T>
std::string FoldedLayers<T>::refusal(const Context<Cuda>& context, const EncoderConfig& c,
                                     const std::vector<LayerWeights<T>>& layers) {
  if (context.capability != 90) return "needs a GPU of capability 9.0";
  if (most_tokens_by_default() == 0) return "switched off";
  if (c.norm_place != NormPlace::post) return "LayerNorm comes first in this model";
  if (c.layers == 0) return "there are no layers";
  if (c.hidden % 8 != 0 || c.inter % 8 != 0) return "hidden and inter must be multiples of 8";
  if (c.hidden > kMostColumns) return "hidden is more than " + std::to_string(kMostColumns);
  for (const LayerWeights<T>& layer : layers)
    for (const Linear<T>* linear : {&layer.qkv, &layer.out, &layer.up, &layer.down})
      for (const void* pointer : {linear->weight.data, static_cast<const void*>(linear->bias)})
        if (!pointer || reinterpret_cast<uintptr_t>(pointer) % 16 != 0)
          return "a weight is missing or does not begin at 16 bytes";
  for (const LayerWeights<T>& layer : layers)
    for (const Norm<T>* norm : {&layer.attention_norm, &layer.ffn_norm})
      if (!norm->gamma || !norm->beta) return "a LayerNorm has no gamma or beta";
  return "";
}

template <class T>
int64_t FoldedLayers<T>::memory_floats(const EncoderConfig& c) {
  const int64_t corrected = 2 * (3 * c.hidden + c.inter), summing = 3 * (2 * c.hidden + kAlone);
  return c.layers * (corrected + summing);
}

template <class T>
int64_t FoldedLayers<T>::moments_words(int64_t tokens) {
  return 2 * kMomentWords * (tokens + kGemmRowSlack<Cuda>);
}

template <class T>
FoldedLayers<T>::FoldedLayers(const Context<Cuda>& context, const EncoderConfig& config,
                              const std::vector<LayerWeights<T>>& layers, float* memory)
    : config_(config), layers_(layers), most_tokens_(most_tokens_by_default()) {
  const DeviceGuard guard(context.device);
  const auto take = [&](int64_t floats) {
    float* const taken = memory;
    memory += floats;
    return taken;
  };
  // before: what the LayerNorm that is pending has left, and its beta.
  const auto corrected = [&](const Linear<T>& linear, const SumVectors& before, const T* beta) {
    const int64_t n = linear.weight.n;
    const CorrectionVectors made{take(n), take(n)};
    fold_weight(context, kDType<T>, linear.weight.data, linear.bias, before.gamma, beta, n, linear.weight.k, made.add,
                made.slope);
    return made;
  };
  const auto summing = [&](const Linear<T>& linear, const T* beta, const T* gamma) {
    const int64_t n = linear.weight.n;
    const SumVectors made{take(n), take(n), take(kAlone)};
    fold_sum(context, kDType<T>, linear.bias, beta, gamma, n, made.add, made.gamma, made.unscale);
    return made;
  };
  SumVectors before{};
  const T* beta = nullptr;
  for (const LayerWeights<T>& layer : layers) {
    LayerVectors made;
    made.qkv = corrected(layer.qkv, before, beta);
    made.out = summing(layer.out, beta, layer.attention_norm.gamma);
    made.up = corrected(layer.up, made.out, layer.attention_norm.beta);
    made.down = summing(layer.down, layer.attention_norm.beta, layer.ffn_norm.gamma);
    made.last_down = summing(layer.down, layer.attention_norm.beta, nullptr);
    before = made.down, beta = layer.ffn_norm.beta;
    vectors_.push_back(made);
  }
}

template <class T>
auto FoldedLayers<T>::takes(const Context<Cuda>& context, int64_t tokens) const -> std::optional<Products> {
  if (tokens == 0 || tokens > most_tokens_) return std::nullopt;
  const LayerWeights<T>& layer = layers_.front();
  const int64_t rows = gemm_rows(context, tokens);
  const auto variant = [&](const Linear<T>& linear, Epilogue epilogue) {
    return wgmma_tile_variant(context, linear, rows, epilogue);
  };
  const Products all{variant(layer.qkv, {.bias = true}), variant(layer.out, {}),
                     variant(layer.up, {.bias = true, .activation = config_.activation}), variant(layer.down, {})};
  if (std::min({all.qkv, all.out, all.up, all.down}) < 0) return std::nullopt;
  return all;
}

template <class T>
std::string FoldedLayers<T>::sizes(const Context<Cuda>& context) const {
  std::string all;
  for (int64_t tokens = 1, first = 0; tokens <= most_tokens_;) {
    const int64_t last = std::min(gemm_rows(context, tokens), most_tokens_);
    const bool taken = takes(context, tokens).has_value();
    if (taken && !first) first = tokens;
    if (first && (!taken || last == most_tokens_)) {
      all += (all.empty() ? "" : ", ") + std::to_string(first) + " to " + std::to_string(taken ? last : tokens - 1);
      first = 0;
    }
    tokens = last + 1;
  }
  return all;
}

template <class T>
void FoldedLayers<T>::run(Context<Cuda>& context, const FoldedInput<T>& in, const Products& products) const {
  const int64_t rows = gemm_rows(context, in.tokens);
  const float eps = static_cast<float>(config_.layer_norm_eps);
  const AddedMoments of_attention{in.moments}, of_ffn{in.moments + rows * kMomentWords};
  const T* x = in.hidden;
  PendingNorm pending;
  const auto corrected = [&](int variant, const Linear<T>& linear, const CorrectionVectors& vectors,
                             Activation activation, T* to, const AddedMoments& cleared) {
    run_corrected(context, variant, product_of(linear, rows, {.activation = activation}),
                  {.a = x, .b = linear.weight.data, .c = to}, vectors.add, vectors.slope, pending, cleared);
  };
  const auto sum = [&](int variant, const Linear<T>& linear, const SumVectors& vectors, const T* a,
                       const AddedMoments& moments) {
    run_summing(context, variant, product_of(linear, rows, {}), {.a = a, .b = linear.weight.data, .c = in.sum},
                vectors.add, x, pending, vectors.gamma, moments);
    x = in.sum;
    pending = {vectors.gamma, vectors.unscale, moments, eps};
  };
  for (int64_t i = 0; i < in.layers; ++i) {
    const LayerWeights<T>& layer = layers_[i];
    const LayerVectors& vectors = vectors_[i];
    corrected(products.qkv, layer.qkv, vectors.qkv, Activation::none, in.qkv, of_attention);
    attention<Cuda, T>(context, in.qkv, in.tokens, 0, in.cu_seqlens, {}, in.batch, in.max_seqlen, in.max_seqlen,
                       config_.heads, config_.head_size, in.attention_scratch, in.context);
    sum(products.out, layer.out, vectors.out, in.context, of_attention);
    corrected(products.up, layer.up, vectors.up, config_.activation, in.inner, of_ffn);
    sum(products.down, layer.down, i + 1 < in.layers ? vectors.down : vectors.last_down, in.inner, of_ffn);
  }
  const Norm<T>& norm = layers_[in.layers - 1].ffn_norm;
  add_bias_input_layernorm<Cuda, T>(context, in.sum, nullptr, nullptr, norm.gamma, norm.beta, eps, in.tokens,
                                    config_.hidden, nullptr, in.hidden);
}

template class FoldedLayers<half_t>;
template class FoldedLayers<bfloat16_t>;

}  // namespace ftbert
