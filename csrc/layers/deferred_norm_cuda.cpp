// The order of a layer's kernels where LayerNorms are deferred, and who hands what to whom.
#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "core/device_guard.h"
#include "core/dispatch.h"
#include "gemm/gemm.h"
#include "gemm/own/deferred_norm.h"
#include "kernels/kernels.h"
#include "layers/deferred_norm.h"

namespace ftbert {
namespace {

// From more tokens on LayerNorm kernels are faster. $FTBERT_DEFERRED_NORM: "off", "on", or another number.
int64_t most_tokens_by_default() {
  const char* value = std::getenv("FTBERT_DEFERRED_NORM");
  if (!value || std::string_view(value) == "on") return 1024;
  const std::string_view words = value;
  if (words == "off") return 0;
  FTBERT_CHECK(!words.empty() && words.size() < 10 && words.find_first_not_of("0123456789") == words.npos,
               "FTBERT_DEFERRED_NORM is \"", words,
               "\"; expected off, on, or up to how many tokens LayerNorms are deferred");
  return std::atoll(value);
}

template <class T>
std::string refusal(const Context<Cuda>& context, const EncoderConfig& c, const Weights<T>& weights,
                    AttentionPath path) {
  if (path != AttentionPath::fused || c.relative_span > 0) return "attention has a bias or takes the general path";
  if (context.capability != 90) return "needs a GPU of capability 9.0";
  if (most_tokens_by_default() == 0) return "switched off";
  if (c.layers.empty()) return "there are no layers";
  for (const LayerConfig& layer : c.layers)
    if (layer.norm_place != NormPlace::post) return "LayerNorm comes first in this model";
  if (c.hidden > kMostColumns) return "hidden is more than " + std::to_string(kMostColumns);
  // Products are chosen for one layer and run in all.
  const LayerConfig& first = c.layers.front();
  for (const LayerConfig& layer : c.layers)
    if (layer.attention.heads.qkv_width() != first.attention.heads.qkv_width() || layer.ffn.inter != first.ffn.inter ||
        layer.ffn.activation != first.ffn.activation)
      return "its layers differ";
  for (const Layer<T>& layer : weights.layers) {
    if (c.hidden % 8 != 0 || layer.config.attention.heads.width() % 8 != 0 || layer.config.ffn.inter % 8 != 0)
      return "hidden and inter must be multiples of 8";
    for (const Linear<T>* linear : {&layer.qkv, &layer.out, &layer.up, &layer.down})
      for (const void* pointer : {linear->weight.data, static_cast<const void*>(linear->bias)})
        if (!pointer || reinterpret_cast<uintptr_t>(pointer) % 16 != 0)
          return "a weight is missing or does not begin at 16 bytes";
    for (const Norm<T>* norm : {&layer.attention_norm, &layer.ffn_norm})
      if (norm->kind != NormKind::layer || !norm->beta) return "a norm is no LayerNorm with gamma and beta";
  }
  return "";
}

// What gammas, betas and biases of the LayerNorms on both sides of a product make of it (gemm/own/deferred_norm.h).
struct CorrectionVectors {
  float *add, *slope;
};
struct SumVectors {
  float *add, *gamma, *unscale;
};
struct LayerVectors {
  CorrectionVectors qkv, up;
  SumVectors out, down, last_down;  // last_down: where this layer is the last to run
};

// The variant of wgmma_tile that each product of a layer runs.
struct Variants {
  int qkv, out, up, down;
};

template <class T>
class DeferredStack : public Stack<Cuda, T> {
 public:
  DeferredStack(const EncoderConfig& config, const Weights<T>& weights, const std::vector<LayerVectors>& vectors,
                const Variants& variants)
      : config_(config), weights_(weights), vectors_(vectors), variants_(variants) {}

  // b.projected holds the stream from the first sum on: what LayerNorm is pending on, times its gamma.
  void run(Context<Cuda>& context, const PackedBatch& batch, const std::vector<Run>&, int64_t layers,
           LayerBuffers<T>& b, T* hidden, const HiddenStateHook<T>&) const override {
    const int64_t rows = gemm_rows(context, batch.tokens);
    const AddedMoments of_attention{b.row_moments}, of_ffn{b.row_moments + rows * kMomentWords};
    const T* x = hidden;
    PendingNorm pending;
    const Sequences sequences = Sequences::of_tokens(batch.cu_seqlens, batch.batch, batch.max_seqlen, batch.tokens);
    const auto corrected = [&](int variant, const Linear<T>& linear, const CorrectionVectors& vectors,
                               Activation activation, T* to, const AddedMoments& cleared) {
      run_corrected(context, variant, product_of(linear, rows, {.activation = activation}),
                    {.a = x, .b = linear.weight.data, .c = to}, vectors.add, vectors.slope, pending, cleared);
    };
    const auto sum = [&](int variant, const Linear<T>& linear, const SumVectors& vectors, const T* a,
                         const AddedMoments& moments, float eps) {
      run_summing(context, variant, product_of(linear, rows, {}), {.a = a, .b = linear.weight.data, .c = b.projected},
                  vectors.add, x, pending, vectors.gamma, moments);
      x = b.projected;
      pending = {vectors.gamma, vectors.unscale, moments, eps};
    };
    for (int64_t i = 0; i < layers; ++i) {
      const Layer<T>& layer = weights_.layers[i];
      const Heads& heads = layer.config.attention.heads;
      const LayerVectors& v = vectors_[i];
      corrected(variants_.qkv, layer.qkv, v.qkv, Activation::none, b.qkv, of_attention);
      attention<Cuda, T>(context, heads, QueriesKeysValues::side_by_side(Operand::of(b.qkv), heads), sequences,
                         {layer.config.attention.window, {}}, b.attention_scratch, b.attended);
      sum(variants_.out, layer.out, v.out, b.attended, of_attention, layer.attention_norm.eps);
      corrected(variants_.up, layer.up, v.up, layer.config.ffn.activation, b.inner, of_ffn);
      sum(variants_.down, layer.down, i + 1 < layers ? v.down : v.last_down, b.inner, of_ffn, layer.ffn_norm.eps);
    }
    const Norm<T>& norm = weights_.layers[layers - 1].ffn_norm;
    add_bias_input_layernorm<Cuda, T>(context, b.projected, nullptr, nullptr, norm, batch.tokens, config_.hidden,
                                      nullptr, hidden);
  }

 private:
  const EncoderConfig& config_;
  const Weights<T>& weights_;
  const std::vector<LayerVectors>& vectors_;
  const Variants variants_;
};

template <class T>
class DeferredNormCuda : public DeferredNorm<Cuda, T> {
 public:
  DeferredNormCuda(const Context<Cuda>& context, const EncoderConfig& config, const Weights<T>& weights,
                   const AllocateFloats& allocate)
      : config_(config), weights_(weights), most_tokens_(most_tokens_by_default()) {
    const DeviceGuard guard(context.device);
    // before: what the pending LayerNorm has left; beta: its beta.
    const auto corrected = [&](const Linear<T>& linear, const SumVectors& before, const T* beta) {
      const Matrix& w = linear.weight;
      const CorrectionVectors made{allocate(w.n), allocate(w.n)};
      make_correction_vectors(context, kDType<T>, w.data, linear.bias, before.gamma, beta, w.n, w.k, made.add,
                              made.slope);
      return made;
    };
    const auto summing = [&](const Linear<T>& linear, const T* beta, const T* gamma) {
      const int64_t n = linear.weight.n;
      const SumVectors made{allocate(n), allocate(n), allocate(1)};
      make_sum_vectors(context, kDType<T>, linear.bias, beta, gamma, n, made.add, made.gamma, made.unscale);
      return made;
    };
    SumVectors before{};
    const T* beta = nullptr;
    for (const Layer<T>& layer : weights_.layers) {
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

  // The row moments of both of a layer's LayerNorms. Whether a call is deferred may depend on a table that changes
  // between this and the call.
  void carve(Workspace& workspace, int64_t tokens, LayerBuffers<T>& b) const override {
    if (tokens > most_tokens_) return;
    b.row_moments = workspace.take<long long>(2 * kMomentWords * padded_rows<Cuda>(tokens));
  }

  std::unique_ptr<const Stack<Cuda, T>> stack_for(const Context<Cuda>& context, int64_t tokens) const override {
    const std::optional<Variants> found = variants(context, tokens);
    return found ? std::make_unique<DeferredStack<T>>(config_, weights_, vectors_, *found) : nullptr;
  }

  std::string sizes(const Context<Cuda>& context) const override {
    std::string all;
    for (int64_t tokens = 1, first = 0; tokens <= most_tokens_;) {
      const int64_t last = std::min(gemm_rows(context, tokens), most_tokens_);
      const bool taken = variants(context, tokens).has_value();
      if (taken && !first) first = tokens;
      if (first && (!taken || last == most_tokens_)) {
        all += (all.empty() ? "" : ", ") + std::to_string(first) + " to " + std::to_string(taken ? last : tokens - 1);
        first = 0;
      }
      tokens = last + 1;
    }
    return all;
  }

 private:
  // The first layer speaks for all: their shapes are the same (refusal).
  std::optional<Variants> variants(const Context<Cuda>& context, int64_t tokens) const {
    if (tokens == 0 || tokens > most_tokens_) return std::nullopt;
    const Layer<T>& layer = weights_.layers.front();
    const int64_t rows = gemm_rows(context, tokens);
    const auto variant = [&](const Linear<T>& linear, Epilogue epilogue) {
      return wgmma_tile_variant(context, linear, rows, epilogue);
    };
    const Variants all{variant(layer.qkv, {.bias = true}), variant(layer.out, {}),
                       variant(layer.up, {.bias = true, .activation = layer.config.ffn.activation}),
                       variant(layer.down, {})};
    if (std::min({all.qkv, all.out, all.up, all.down}) < 0) return std::nullopt;
    return all;
  }

  const EncoderConfig& config_;
  const Weights<T>& weights_;
  int64_t most_tokens_;
  std::vector<LayerVectors> vectors_;
};

}  // namespace

template <class T>
DeferredNormChoice<Cuda, T> make_deferred_norm(const Context<Cuda>& context, const EncoderConfig& config,
                                               const Weights<T>& weights, AttentionPath path,
                                               const AllocateFloats& allocate) {
  if constexpr (sizeof(T) != 2) {
    return {};
  } else {
    const std::string why_not = refusal(context, config, weights, path);
    if (!why_not.empty()) return {nullptr, why_not};
    return {std::make_shared<DeferredNormCuda<T>>(context, config, weights, allocate), ""};
  }
}

#define FTBERT_INSTANTIATE(T)                                                                         \
  template DeferredNormChoice<Cuda, T> make_deferred_norm(const Context<Cuda>&, const EncoderConfig&, \
                                                          const Weights<T>&, AttentionPath, const AllocateFloats&);
FTBERT_CUDA_TYPES(FTBERT_INSTANTIATE)

}  // namespace ftbert
