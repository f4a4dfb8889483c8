// Which products of a layer do the work of the LayerNorms between them, and what each hands to the next.
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
    if (layer.ffn.gated) return "a feed-forward layer has a gate";
  for (const Layer<T>& layer : weights.layers)
    for (const BlockNorms<T>* norms : {&layer.attention_norms, &layer.ffn_norms}) {
      if (norms->before) return "LayerNorm comes first in this model";
      if (norms->result || !norms->after.is_layernorm_with_beta()) return "a norm is no LayerNorm with gamma and beta";
    }
  if (weights.final_norm) return "a norm follows the last layer's";
  if (c.hidden > kMostColumns) return "hidden is more than " + std::to_string(kMostColumns);
  // Products are chosen for one layer and run in all.
  const LayerConfig& first = c.layers.front();
  for (const LayerConfig& layer : c.layers)
    if (layer.attention.heads.width() != first.attention.heads.width() ||
        layer.attention.heads.kv_width() != first.attention.heads.kv_width() || layer.ffn.inter != first.ffn.inter ||
        layer.ffn.activation != first.ffn.activation)
      return "its layers differ";
  for (const Layer<T>& layer : weights.layers) {
    if (c.hidden % 8 != 0 || layer.config.attention.heads.width() % 8 != 0 || layer.config.ffn.inter % 8 != 0)
      return "hidden and inter must be multiples of 8";
    for (const Linear<T>* linear : {&layer.qkv, &layer.out, &layer.up, &layer.down})
      for (const void* pointer : {linear->weight.data, static_cast<const void*>(linear->bias)})
        if (!pointer || reinterpret_cast<uintptr_t>(pointer) % 16 != 0)
          return "a weight is missing or does not begin at 16 bytes";
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

// The stream is at x_: the call's input until the first sum, then b.projected, which holds it times the gamma of the
// norm that is pending.
template <class T>
class DeferredCallCuda : public DeferredCall<Cuda, T> {
 public:
  DeferredCallCuda(const std::vector<LayerVectors>& vectors, const Variants& variants, int64_t layers, int64_t rows,
                   int64_t cols, const LayerBuffers<T>& b, const T* x)
      : vectors_(vectors),
        variants_(variants),
        layers_(layers),
        rows_(rows),
        cols_(cols),
        of_attention_{b.deferred_moments},
        of_ffn_{b.deferred_moments + rows * kMomentWords},
        sum_(b.projected),
        x_(x) {}

  Operand project(Context<Cuda>& context, const Linear<T>& linear, Activation activation, const Operand& out) override {
    const LayerVectors& v = vectors_[layer_];
    const CorrectionVectors& vectors = in_ffn_ ? v.up : v.qkv;
    run_corrected(
        context, in_ffn_ ? variants_.up : variants_.qkv, product_of(linear, rows_, {.activation = activation}),
        {.a = x_, .b = linear.weight.data, .c = out.template as<T>()}, vectors.add, vectors.slope, pending_, moments());
    return out;
  }

  void add(Context<Cuda>& context, const Linear<T>& linear, const Operand& a, const Norm<T>& norm) override {
    const LayerVectors& v = vectors_[layer_];
    const SumVectors& vectors = !in_ffn_ ? v.out : layer_ + 1 < layers_ ? v.down : v.last_down;
    run_summing(context, in_ffn_ ? variants_.down : variants_.out, product_of(linear, rows_, {}),
                {.a = a.template as<T>(), .b = linear.weight.data, .c = sum_}, vectors.add, x_, pending_, vectors.gamma,
                moments());
    x_ = sum_;
    pending_ = {vectors.gamma, vectors.unscale, moments(), norm.eps};
    norm_ = norm;
    layer_ += in_ffn_;
    in_ffn_ = !in_ffn_;
  }

  void settle(Context<Cuda>& context, int64_t tokens, T* x) override {
    add_bias_input_layernorm<Cuda, T>(context, sum_, nullptr, nullptr, norm_, tokens, cols_, {.normed = x});
  }

 private:
  DeferredMoments moments() const { return in_ffn_ ? of_ffn_ : of_attention_; }

  const std::vector<LayerVectors>& vectors_;
  const Variants variants_;
  const int64_t layers_, rows_, cols_;
  const DeferredMoments of_attention_, of_ffn_;
  T* const sum_;  // [rows, hidden]
  const T* x_;
  PendingNorm pending_;
  Norm<T> norm_;       // the same, for a kernel
  int64_t layer_ = 0;  // whose product comes next
  bool in_ffn_ = false;
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
      made.out = summing(layer.out, beta, layer.attention_norms.after.gamma);
      made.up = corrected(layer.up, made.out, layer.attention_norms.after.beta);
      made.down = summing(layer.down, layer.attention_norms.after.beta, layer.ffn_norms.after.gamma);
      made.last_down = summing(layer.down, layer.attention_norms.after.beta, nullptr);
      before = made.down, beta = layer.ffn_norms.after.beta;
      vectors_.push_back(made);
    }
  }

  // The row moments of both of a layer's LayerNorms. Whether a call is deferred may depend on a table that changes
  // between this and the call.
  void carve(Workspace& workspace, int64_t tokens, LayerBuffers<T>& b) const override {
    if (tokens > most_tokens_) return;
    b.deferred_moments = workspace.take<long long>(2 * kMomentWords * rows_with_slack<Cuda>(tokens));
  }

  std::unique_ptr<DeferredCall<Cuda, T>> start(const Context<Cuda>& context, int64_t tokens, int64_t layers,
                                               const LayerBuffers<T>& b, const T* x) const override {
    const std::optional<Variants> found = variants(context, tokens);
    if (!found) return nullptr;
    return std::make_unique<DeferredCallCuda<T>>(vectors_, *found, layers, gemm_rows(context, tokens), config_.hidden,
                                                 b, x);
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
