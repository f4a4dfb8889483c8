// The order of a folded layer's kernels, and who hands what to whom.
#include <cstdlib>

#include "core/check.h"
#include "core/device_guard.h"
#include "folded_layers.h"
#include "gemm/gemm.h"
#include "gemm/gemm_folded.h"
#include "gemm/gemm_plans.h"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

// $FTBERT_FOLDED_NORM: another number, or "off"; read when a model is made.
int64_t most_tokens_by_default() {
  const char* value = std::getenv("FTBERT_FOLDED_NORM");
  return value ? std::strtoll(value, nullptr, 10) : 1024;
}

}  // namespace

template <class T>
std::string FoldedLayers<T>::refusal(const Context<Cuda>& context, const EncoderConfig& c,
                                     const std::vector<LayerWeights<T>>& layers) {
  if (context.capability != 90) return "needs a GPU of capability 9.0";
  if (most_tokens_by_default() <= 0) return "switched off";
  if (c.norm_place != NormPlace::post) return "LayerNorm comes first in this model";
  if (c.layers == 0) return "there are no layers";
  if (c.hidden % 8 != 0 || c.inter % 8 != 0) return "hidden and inter must be multiples of 8";
  for (const LayerWeights<T>& layer : layers)
    for (const T* pointer : {layer.qkv.weight, layer.qkv.bias, layer.out.weight, layer.out.bias, layer.up.weight,
                             layer.up.bias, layer.down.weight, layer.down.bias})
      if (!pointer || reinterpret_cast<uintptr_t>(pointer) % 16 != 0)
        return "a weight is missing or does not begin at 16 bytes";
  for (const LayerWeights<T>& layer : layers)
    for (const Norm<T>* norm : {&layer.attention_norm, &layer.ffn_norm})
      if (!norm->gamma || !norm->beta) return "a LayerNorm has no gamma or beta";
  return "";
}

template <class T>
int64_t FoldedLayers<T>::memory_floats(const EncoderConfig& c) {
  return c.layers * 2 * (3 * c.hidden + c.inter + 2 * c.hidden);
}

template <class T>
int64_t FoldedLayers<T>::moments_words(int64_t tokens) {
  return 2 * (tokens + kGemmRowSlack<Cuda>)*kMomentWords;
}

template <class T>
FoldedLayers<T>::FoldedLayers(const Context<Cuda>& context, const EncoderConfig& config,
                              const std::vector<LayerWeights<T>>& layers, float* memory)
    : config_(config), layers_(layers), most_tokens_(most_tokens_by_default()) {
  const DeviceGuard guard(context.device);
  const auto two = [&](int64_t n) {
    const Vectors made{memory, memory + n};
    memory += 2 * n;
    return made;
  };
  const auto corrected = [&](const Linear<T>& linear, const Norm<T>* before) {
    const Vectors made = two(linear.n);
    fold_weight(context, kDType<T>, linear.weight, linear.bias, before ? before->gamma : nullptr,
                before ? before->beta : nullptr, linear.n, linear.k, made.add, made.gamma);
    return made;
  };
  const auto summing = [&](const Linear<T>& linear, const Norm<T>* before, const Norm<T>& after) {
    const Vectors made = two(linear.n);
    fold_sum(context, kDType<T>, linear.bias, before ? before->beta : nullptr, after.gamma, linear.n, made.add,
             made.gamma);
    return made;
  };
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerWeights<T>& layer = layers[i];
    const Norm<T>* const before = i > 0 ? &layers[i - 1].ffn_norm : nullptr;
    vectors_.push_back({corrected(layer.qkv, before), summing(layer.out, before, layer.attention_norm),
                        corrected(layer.up, &layer.attention_norm),
                        summing(layer.down, &layer.attention_norm, layer.ffn_norm)});
  }
}

template <class T>
auto FoldedLayers<T>::variants(const Context<Cuda>& context, int64_t rows) const -> Variants {
  const LayerWeights<T>& layer = layers_.front();
  return {few_variant(context, layer.qkv, rows, {.bias = true}), few_variant(context, layer.out, rows, {}),
          few_variant(context, layer.up, rows, {.bias = true, .activation = config_.activation}),
          few_variant(context, layer.down, rows, {})};
}

template <class T>
bool FoldedLayers<T>::takes(const Context<Cuda>& context, int64_t tokens) const {
  return tokens > 0 && tokens <= most_tokens_ && variants(context, gemm_rows(context, tokens)).all();
}

template <class T>
void FoldedLayers<T>::run(Context<Cuda>& context, const FoldedInput<T>& in) const {
  const int64_t rows = gemm_rows(context, in.tokens);
  const Variants by = variants(context, rows);
  FTBERT_CHECK(by.all(), "folded layers: no product for ", rows, " rows");
  const float eps = static_cast<float>(config_.layer_norm_eps);
  const RowMoments of_attention{in.moments}, of_ffn{in.moments + rows * kMomentWords};
  const auto product = [&](const Linear<T>& linear, const T* a, T* c, Activation activation = Activation::none) {
    return FusedGemm{rows, linear.n, linear.k, kDType<T>, activation, a, linear.weight, nullptr, c};
  };
  const T* x = in.hidden;
  PendingNorm pending;
  const auto corrected = [&](int variant, const Linear<T>& linear, const Vectors& vectors, Activation activation, T* to,
                             const RowMoments& cleared) {
    run_corrected(context, variant, product(linear, x, to, activation), vectors.add, vectors.gamma, pending, cleared);
  };
  const auto sum = [&](int variant, const Linear<T>& linear, const Vectors& vectors, const T* a,
                       const RowMoments& moments) {
    run_summing(context, variant, product(linear, a, in.sum), vectors.add, x, pending, vectors.gamma, moments);
    x = in.sum;
    pending = {vectors.gamma, moments, eps};
  };
  for (int64_t i = 0; i < in.layers; ++i) {
    const LayerWeights<T>& layer = layers_[i];
    const LayerVectors& vectors = vectors_[i];
    corrected(by.qkv, layer.qkv, vectors.qkv, Activation::none, in.qkv, of_attention);
    attention<Cuda, T>(context, in.qkv, in.tokens, 0, in.cu_seqlens, {}, in.batch, in.max_seqlen, in.max_seqlen,
                       config_.heads, config_.head_size, in.attention_scratch, in.context);
    sum(by.out, layer.out, vectors.out, in.context, of_attention);
    corrected(by.up, layer.up, vectors.up, config_.activation, in.inner, of_ffn);
    sum(by.down, layer.down, {vectors.down.add, i + 1 < in.layers ? vectors.down.gamma : nullptr}, in.inner, of_ffn);
  }
  const Norm<T>& norm = layers_[in.layers - 1].ffn_norm;
  add_bias_input_layernorm<Cuda, T>(context, in.sum, nullptr, nullptr, norm.gamma, norm.beta, eps, in.tokens,
                                    config_.hidden, nullptr, in.hidden);
}

template class FoldedLayers<half_t>;
template class FoldedLayers<bfloat16_t>;

}  // namespace ftbert
