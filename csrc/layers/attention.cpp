#include "layers/attention.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/dispatch.h"

namespace ftbert {
namespace {

// The general path, over as many sequences at a time as the buffers hold.
template <class Device, class T>
void attend_general(Context<Device>& context, const AttentionConfig& c, const T* qkv, const T* bias,
                    const PackedBatch& batch, const Run& run, const RelativeBias<T>& relative_bias,
                    const LayerBuffers<T>& b) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(c.head_size));
  const int64_t seq = batch.max_seqlen;
  for (int64_t first = 0; first < run.sequences; first += b.general_sequences) {
    const int64_t sequences = std::min(b.general_sequences, run.sequences - first);
    const int32_t* cu = batch.cu_seqlens + run.first_sequence + first;
    const DType t = kDType<T>;
    const Product scores{seq, seq, c.head_size, t, t, DType::fp32, {}, sequences * c.heads};
    const Product sums{seq, c.head_size, seq, t, t, t, {}, sequences * c.heads, /*b_transposed=*/false};
    add_qkv_bias<Device, T>(context, qkv, bias, run.first_token, cu, sequences, seq, c.heads, c.head_size, b.q, b.k,
                            b.v);
    gemm<Device, T, float>(context, scores, b.q, b.k, b.scores);
    softmax<Device, T>(context, b.scores, cu, scale, relative_bias, sequences, c.heads, seq, b.probabilities);
    gemm<Device, T, T>(context, sums, b.probabilities, b.v, b.q);
    transpose<Device, T>(context, b.q, run.first_token, cu, sequences, seq, c.heads, c.head_size, b.attended);
  }
}

}  // namespace

template <class Device, class T>
AttentionChoice choose_attention(const Context<Device>& context, const EncoderConfig& config,
                                 std::optional<AttentionPath> asked) {
  for (const LayerConfig& layer : config.layers) {
    const int64_t head_size = layer.attention.head_size;
    if (attention_supports<Device, T>(context, head_size)) continue;
    FTBERT_CHECK(asked != AttentionPath::fused, "the fused attention path does not support head size ", head_size,
                 " in ", to_string(kDType<T>), " on this device; use the general path");
    return {AttentionPath::general,
            asked ? "asked for" : "the fused path has no kernel for this head size, dtype and device"};
  }
  return {asked.value_or(AttentionPath::fused), asked ? "asked for" : "supports this head size, dtype and device"};
}

template <class Device, class T>
void attend(Context<Device>& context, const Layer<T>& layer, const PackedBatch& batch, const Run& run, const T* x,
            int64_t queries, const RelativeBias<T>& relative_bias, AttentionPath path, const LayerBuffers<T>& b) {
  const bool fused = path == AttentionPath::fused;
  const AttentionConfig& c = layer.config.attention;
  const RelativeBias<T> bias = c.relative_bias ? relative_bias : RelativeBias<T>{};
  // The general path adds the bias itself, in its own order.
  const Operand qkv = linear_all(context, layer.qkv, Operand::of(x), run.tokens, {.bias = fused}, b.qkv,
                                 fused ? attention_operand<Device, T>(layer.qkv.weight.dtype) : kDType<T>);
  if (fused)
    attention<Device, T>(context, qkv, run.tokens, run.first_token, batch.cu_seqlens + run.first_sequence, bias,
                         run.sequences, batch.max_seqlen, queries, c.heads, c.head_size, b.attention_scratch,
                         b.attended);
  else
    attend_general(context, c, qkv.as<T>(), layer.qkv.bias, batch, run, bias, b);
}

#define FTBERT_INSTANTIATE(D, T)                                                                        \
  template AttentionChoice choose_attention<D, T>(const Context<D>&, const EncoderConfig&,              \
                                                  std::optional<AttentionPath>);                        \
  template void attend(Context<D>&, const Layer<T>&, const PackedBatch&, const Run&, const T*, int64_t, \
                       const RelativeBias<T>&, AttentionPath, const LayerBuffers<T>&);
FTBERT_BACKENDS(FTBERT_INSTANTIATE)

}  // namespace ftbert
