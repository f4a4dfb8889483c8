#include "encoder.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include "core/check.h"
#include "core/dispatch.h"
#include "gemm/gemm.h"
#include "kernels/kernels.h"
#include "layers/cpu_shares.h"
#include "layers/encoder_buffers.h"

namespace ftbert {

// A run of whole sequences that goes through a layer together.
template <class Device, class T>
struct Encoder<Device, T>::Pass {
  int64_t first_sequence, sequences, first_token, tokens;
};

// Rows that go through the products after attention together. `computed` rows run through a product, `rows` of them
// are read (gemm_rows).
template <class Device, class T>
struct Encoder<Device, T>::Piece {
  int64_t first, rows, computed;
};

template <class Device, class T>
Encoder<Device, T>::Encoder(EncoderConfig config, Weights<T> weights, AttentionPath path, bool fused_supported)
    : config_(std::move(config)), weights_(std::move(weights)) {
  FTBERT_CHECK(path != AttentionPath::fused || fused_supported, "the fused attention path does not support head size ",
               config_.head_size, " in ", to_string(std::is_same_v<T, float> ? DType::fp32 : DType::fp16),
               " on this device; use the general path");
  fused_ = path != AttentionPath::general && fused_supported;
  reason_ = path != AttentionPath::automatic ? "asked for"
            : fused_supported                ? "supports this head size, dtype and device"
                                             : "the fused path has no kernel for this head size, dtype and device";
}

template <class Device, class T>
void Encoder<Device, T>::fold_layernorms(const Context<Device>& context,
                                         const std::function<float*(int64_t floats)>& allocate) {
  if constexpr (may_fold<Device, T>) {
    not_folded_ = fused_ && config_.relative_span == 0 ? FoldedLayers<T>::refusal(context, config_, weights_.layers)
                                                       : "attention has a bias or takes the general path";
    if (not_folded_.empty())
      folded_ = std::make_shared<FoldedLayers<T>>(context, config_, weights_.layers,
                                                  allocate(FoldedLayers<T>::memory_floats(config_)));
  }
}

template <class Device, class T>
std::string Encoder<Device, T>::folded_state(const Context<Device>& context) const {
  std::string sizes;
  if constexpr (may_fold<Device, T>)
    if (folded_) sizes = folded_->sizes(context);
  if (!sizes.empty()) return "of " + sizes + " tokens";
  return "no: " +
         (folded_ ? "no number of tokens has all four products of a layer from gemm_few_cuda.cu" : not_folded_);
}

template <class Device, class T>
auto Encoder<Device, T>::pieces(const Context<Device>& context, int64_t rows) -> std::vector<Piece> {
  std::vector<Piece> all;
  for (int64_t first = 0; first < rows;) {
    const int64_t left = rows - first, computed = gemm_rows(context, left);
    all.push_back({first, std::min(left, computed), computed});
    first += all.back().rows;
  }
  return all;
}

// b.context = softmax(q k^T / sqrt(head_size)) v of x [pass.tokens, hidden], by the path chosen at construction; of
// each sequence the first `queries` rows at least.
template <class Device, class T>
void Encoder<Device, T>::attend(Context<Device>& context, const LayerWeights<T>& layer, const EncoderInput& input,
                                const Pass& pass, const Buffers& b, const T* x, int64_t queries) const {
  const EncoderConfig& c = config_;
  const T* qkv = linear_in_pieces(context, layer.qkv, x, pass.tokens, {.bias = fused_, .for_attention = fused_}, b.qkv);
  const int32_t* cu_seqlens = input.cu_seqlens + pass.first_sequence;
  const RelativeBias<T> bias{weights_.relative_bias, input.columns ? input.columns : b.columns, c.relative_span};
  if (fused_) {
    attention<Device, T>(context, qkv, pass.tokens, pass.first_token, cu_seqlens, bias, pass.sequences,
                         input.max_seqlen, queries, c.heads, c.head_size, b.attention_scratch, b.context);
    return;
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(c.head_size));
  const int64_t seq = input.max_seqlen;
  for (int64_t first = 0; first < pass.sequences; first += b.general_sequences) {
    const int64_t batch = std::min(b.general_sequences, pass.sequences - first);
    const int32_t* cu = cu_seqlens + first;
    add_qkv_bias<Device, T>(context, qkv, layer.qkv.bias, pass.first_token, cu, batch, seq, c.heads, c.head_size, b.q,
                            b.k, b.v);
    gemm<Device, T, float>(context, {seq, seq, c.head_size, batch * c.heads, true}, b.q, b.k, b.scores);
    softmax<Device, T>(context, b.scores, cu, scale, bias, batch, c.heads, seq, b.probabilities);
    gemm<Device, T, T>(context, {seq, c.head_size, seq, batch * c.heads, false}, b.probabilities, b.v, b.q);
    transpose<Device, T>(context, b.q, pass.first_token, cu, batch, seq, c.heads, c.head_size, b.context);
  }
}

// What follows attention in a layer, in place on x [rows, hidden], what the layer reads; attended [rows, hidden].
template <class Device, class T>
void Encoder<Device, T>::finish_post_norm(Context<Device>& context, const LayerWeights<T>& layer, Buffers& b,
                                          const T* attended, int64_t rows, T* x) const {
  const float eps = static_cast<float>(config_.layer_norm_eps);
  const int64_t cols = config_.hidden;
  for (const auto [first, count, computed] : pieces(context, rows)) {
    T* piece = x + first * cols;
    linear_layernorm<Device, T>(context, layer.out, attended + first * cols, computed,
                                {layer.attention_norm.gamma, layer.attention_norm.beta, eps, &b.norm_moments}, count,
                                b.projected, piece);
    const T* inner = linear(context, layer.up, piece, computed,
                            {.bias = true, .activation = config_.activation, .for_product = true}, b.inner);
    linear_layernorm<Device, T>(context, layer.down, inner, computed,
                                {layer.ffn_norm.gamma, layer.ffn_norm.beta, eps, &b.norm_moments}, count, b.projected,
                                piece);
  }
}

// The same where LayerNorm comes first: x holds the sum of all blocks so far, `normed` what the next one reads. The
// norm that comes before the next layer (or at the end) is applied where the sum is made.
template <class Device, class T>
void Encoder<Device, T>::finish_pre_norm(Context<Device>& context, int64_t i, const Buffers& b, const T* attended,
                                         int64_t rows, T* x, T* normed) const {
  const LayerWeights<T>& layer = weights_.layers[i];
  const bool last = i + 1 == config_.layers;
  const Norm<T>& next = last ? weights_.final_norm : weights_.layers[i + 1].attention_norm;
  const float eps = static_cast<float>(config_.layer_norm_eps);
  const int64_t cols = config_.hidden;
  for (const auto [first, count, computed] : pieces(context, rows)) {
    T *sum = x + first * cols, *read = normed + first * cols;
    const T* y = linear(context, layer.out, attended + first * cols, computed, {}, b.projected);
    add_bias_input_layernorm<Device, T>(context, y, layer.out.bias, sum, layer.ffn_norm.gamma, layer.ffn_norm.beta, eps,
                                        count, cols, sum, read);

    const T* inner = linear(context, layer.up, read, computed,
                            {.bias = true, .activation = config_.activation, .for_product = true}, b.inner);
    y = linear(context, layer.down, inner, computed, {}, b.projected);
    add_bias_input_layernorm<Device, T>(context, y, layer.down.bias, sum, next.gamma, next.beta, eps, count, cols,
                                        last ? nullptr : sum, last ? sum : read);
  }
}

template <class Device, class T>
void Encoder<Device, T>::place(Context<Device>& context, const EncoderInput& input, int64_t most, int32_t* positions,
                               int32_t* columns) const {
  const auto find = [&](PositionKind kind, int32_t* out) {
    padding_positions<Device>(context, kind, input.input_ids, input.token_index, input.cu_seqlens, input.batch,
                              input.seq, config_.padding_id, most, out);
  };
  find(config_.positions, positions);
  if (columns) find(PositionKind::absolute, columns);
}

// hidden = what the layers start from
template <class Device, class T>
void Encoder<Device, T>::embed(Context<Device>& context, const EncoderInput& input, const Buffers& b, T* hidden) const {
  const EncoderConfig& c = config_;
  if (!input.positions) place(context, input, input.tokens, b.positions, b.columns);
  const EmbeddingTables<T> tables{weights_.word,
                                  weights_.position,
                                  weights_.token_type,
                                  weights_.embedding_norm.gamma,
                                  weights_.embedding_norm.beta,
                                  c.vocab,
                                  c.max_positions,
                                  c.token_types,
                                  static_cast<float>(c.layer_norm_eps)};
  T* embedded = b.embedded ? b.embedded : hidden;
  embeddings_layernorm<Device, T>(context, tables, input.input_ids, input.token_type_ids, input.token_index,
                                  input.positions ? input.positions : b.positions, input.tokens, c.embedding, embedded);
  if (b.embedded) {
    const T* projected =
        linear_in_pieces(context, weights_.embedding_projection, embedded, input.tokens, {.bias = true}, hidden);
    if constexpr (on_cpu<Device>)
      if (projected != hidden) std::copy(projected, projected + input.tokens * c.hidden, hidden);
  }
}

template <class Device, class T>
void Encoder<Device, T>::forward(Context<Device>& context, const EncoderInput& input, Workspace workspace, T* out,
                                 const HiddenStateHook<T>& hook) const {
  const bool first_only = input.rows == OutputRows::first, pre = config_.norm_place == NormPlace::pre;
  const int64_t cols = config_.hidden;
  if (input.tokens == 0) {
    if (first_only) zero_empty_rows<Device, T>(context, input.cu_seqlens, input.batch, cols, out);
    return;
  }
  Buffers b = carve(context, workspace, input);
  T* hidden = first_only ? b.hidden : out;
  embed(context, input, b, hidden);
  if (hook && config_.layers > 0) hook(0, hidden);
  if (pre) {
    const Norm<T>& first = config_.layers > 0 ? weights_.layers[0].attention_norm : weights_.final_norm;
    add_bias_input_layernorm<Device, T>(context, hidden, nullptr, nullptr, first.gamma, first.beta,
                                        static_cast<float>(config_.layer_norm_eps), input.tokens, cols, nullptr,
                                        config_.layers > 0 ? b.normed : hidden);
  }
  if (hook && config_.layers == 0) hook(0, hidden);

  std::vector<Pass> passes{{0, input.batch, 0, input.tokens}};
  if constexpr (on_cpu<Device>) passes = make_passes<Pass>(input.cu_seqlens, 0, input.batch, kCpuPassTokens);
  const auto attend_pass = [&](Context<Device>& own, const Buffers& b, int64_t i, const Pass& pass, int64_t queries) {
    attend(own, weights_.layers[i], input, pass, b, (pre ? b.normed : hidden) + pass.first_token * cols, queries);
  };
  const auto finish = [&](Context<Device>& own, Buffers& b, int64_t i, const T* attended, int64_t rows, T* x,
                          int64_t first_row) {
    pre ? finish_pre_norm(own, i, b, attended, rows, x + first_row * cols, b.normed + first_row * cols)
        : finish_post_norm(own, weights_.layers[i], b, attended, rows, x + first_row * cols);
  };
  const auto layer = [&](Context<Device>& own, Buffers& b, int64_t i, const std::vector<Pass>& of) {
    for (const Pass& pass : of) {
      attend_pass(own, b, i, pass, input.max_seqlen);
      finish(own, b, i, b.context, pass.tokens, hidden, pass.first_token);
    }
  };
  const int64_t last = config_.layers - 1, whole_layers = first_only ? last : config_.layers;
  int64_t done = 0;
  if constexpr (may_fold<Device, T>) {
    const auto products = folded_ && !hook && whole_layers > 0 ? folded_->takes(context, input.tokens) : std::nullopt;
    if (products) {
      folded_->run(context,
                   {.cu_seqlens = input.cu_seqlens,
                    .tokens = input.tokens,
                    .batch = input.batch,
                    .max_seqlen = input.max_seqlen,
                    .layers = whole_layers,
                    .attention_scratch = b.attention_scratch,
                    .hidden = hidden,
                    .sum = b.projected,
                    .qkv = b.qkv,
                    .context = b.context,
                    .inner = b.inner,
                    .moments = b.folded_moments},
                   *products);
      done = whole_layers;
    }
  }
  if constexpr (on_cpu<Device>) {
    if (const auto count = static_cast<int64_t>(b.shares.size()); count > 1 && !hook && whole_layers > 0) {
      context.gemm->each_alone(count, [&](int64_t share, CpuGemm& gemm) {
        Context<Device> own = context;
        own.gemm = &gemm;
        Buffers scratch = b;
        static_cast<Scratch&>(scratch) = b.shares[share];
        const std::vector<Pass> of =
            make_passes<Pass>(input.cu_seqlens, b.cuts[share], b.cuts[share + 1], share_pass_tokens(count));
        for (int64_t i = 0; i < whole_layers; ++i) layer(own, scratch, i, of);
      });
      done = whole_layers;
    }
  }
  for (int64_t i = done; i < whole_layers; ++i) {
    layer(context, b, i, passes);
    if (hook) hook(i + 1, hidden);
  }
  if (!first_only) return;

  // Every token's keys and values, the first token's query. Empty sequences may be in no pass: what their rows hold is
  // overwritten in the end.
  first_rows<Device, T>(context, hidden, 0, input.cu_seqlens, input.batch, cols, out);
  if (last >= 0) {
    for (const Pass& pass : passes) {
      attend_pass(context, b, last, pass, 1);
      first_rows<Device, T>(context, b.context, pass.first_token, input.cu_seqlens + pass.first_sequence,
                            pass.sequences, cols, b.first + pass.first_sequence * cols);
    }
    finish(context, b, last, b.first, input.batch, out, 0);
  }
  zero_empty_rows<Device, T>(context, input.cu_seqlens, input.batch, cols, out);
}

template <class Device, class T>
void Encoder<Device, T>::pool(Context<Device>& context, const T* first, const int32_t* cu_seqlens, int64_t batch,
                              T* out) const {
  if (batch == 0) return;
  const int64_t cols = config_.hidden;
  const T* pooled =
      linear_in_pieces(context, weights_.pooler, first, batch, {.bias = true, .activation = Activation::tanh}, out);
  if constexpr (on_cpu<Device>)
    if (pooled != out) std::copy(pooled, pooled + batch * cols, out);
  zero_empty_rows<Device, T>(context, cu_seqlens, batch, cols, out);
}

#define FTBERT_INSTANTIATE(D, T) template class Encoder<D, T>;
FTBERT_BACKENDS(FTBERT_INSTANTIATE)

}  // namespace ftbert
