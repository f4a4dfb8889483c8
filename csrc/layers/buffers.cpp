// How much memory the layers need, and where in it everything lies.
#include "layers/buffers.h"

#include <algorithm>
#include <type_traits>

#include "core/dispatch.h"
#include "gemm/gpu/contained_norm.h"

namespace ftbert {
namespace {

// The general path keeps [sequences, heads, seq, seq] scores; it works on as many sequences at a time as fit in this.
constexpr int64_t kGeneralScoreElements = int64_t{1} << 26;

// With several chunks of rows, attention's result of the next chunk is read after `inner` of this one was written.
template <class Device>
constexpr bool kAttendedOutlivesInner = std::is_same_v<Device, Cpu>;

}  // namespace

template <class Device, class T>
LayerBuffers<T> carve_layer_buffers(Workspace& ws, const ModelConfig& config, const BufferSizes& sizes) {
  int64_t width = 0, qkv_width = 0, inner = 0, scaled_inner = 0, heads = 0;
  size_t scratch = 0;
  bool of_sums = false;  // a norm follows a sum, its own or the next block's
  const int64_t position_columns = position_stride<Device>(config.position_span, config.position_reach());
  for (const LayerConfig& layer : config.layers) {
    of_sums =
        of_sums || layer.attention_result_norm.kind == NormKind::none || layer.ffn_result_norm.kind == NormKind::none;
    width = std::max(width, layer.attention.heads.width());
    qkv_width = std::max(qkv_width, layer.attention.heads.qkv_width());
    heads = std::max(heads, layer.attention.heads.count);
    scratch =
        std::max(scratch, attention_scratch_bytes<Device, T>(layer.attention.heads, sizes.max_seqlen, sizes.use,
                                                             layer.attention.position_scores ? position_columns : 0));
    if (layer.ffn.down_type) scaled_inner = std::max(scaled_inner, layer.ffn.inter);
    inner = std::max(inner, layer.ffn.inter + (layer.ffn.gated ? layer.ffn.up_rows() : 0));
  }
  const int64_t most = rows_with_slack<Device>(sizes.rows);
  LayerBuffers<T> b;
  if (kNormInsideProducts<Device, T> && of_sums)
    b.exchanged_moments = {ws.take<uint64_t>(exchanged_moment_count(most)), exchanged_moment_count(most)};
  b.projected = ws.take<T>(most * config.hidden);
  if (config.convolution) b.convolved = ws.take<T>(most * config.hidden);
  if (scaled_inner > 0) b.scaled_inner = reinterpret_cast<T*>(ws.take<char>(most * byte_row_bytes(scaled_inner)));
  if (kAttendedOutlivesInner<Device>) b.attended = ws.take<T>(most * width);
  if (const int64_t arrivals = attention_arrivals<Device>(); sizes.use == AttentionUse::decode && arrivals > 0) {
    b.zero_bytes = (arrivals + kTileCounts) * sizeof(int32_t);
    b.zeros = ws.take<char>(static_cast<int64_t>(b.zero_bytes));
    if (b.zeros) {
      b.attention_scratch.arrivals = static_cast<int32_t*>(b.zeros);
      b.tile_counts = static_cast<uint32_t*>(b.zeros) + arrivals;
    }
  }
  const size_t shared = ws.mark();
  b.qkv = ws.take<T>(most * qkv_width);
  if (!kAttendedOutlivesInner<Device>) b.attended = ws.take<T>(most * width);
  if (sizes.path == AttentionPath::fused) {
    b.attention_scratch.memory = ws.take<char>(static_cast<int64_t>(scratch));
  } else {
    const int64_t per_sequence = std::max<int64_t>(1, heads * sizes.max_seqlen * sizes.max_seqlen);
    const int64_t together = kGeneralByLength<Device> ? 1 : std::max<int64_t>(1, sizes.sequences);
    b.general_sequences = std::clamp<int64_t>(kGeneralScoreElements / per_sequence, 1, together);
    const int64_t rows = b.general_sequences * sizes.max_seqlen;
    b.q = ws.take<T>(rows * width);
    b.k = ws.take<T>(rows * width);
    b.v = ws.take<T>(rows * width);
    b.scores = ws.take<float>(b.general_sequences * per_sequence);
    if constexpr (std::is_same_v<T, float>)
      b.probabilities = b.scores;
    else
      b.probabilities = ws.take<T>(b.general_sequences * per_sequence);
  }
  size_t attention_end = ws.bytes();
  ws.release(shared);
  if (config.convolution) {
    b.neighbours = ws.take<T>(most * config.convolution->kernel * config.hidden);
    attention_end = std::max(attention_end, ws.bytes());
    ws.release(shared);
  }
  b.inner = ws.take<T>(most * inner);
  if (ws.bytes() < attention_end) ws.release(attention_end);
  return b;
}

#define FTBERT_INSTANTIATE(D, T) \
  template LayerBuffers<T> carve_layer_buffers<D, T>(Workspace&, const ModelConfig&, const BufferSizes&);
FTBERT_BACKENDS(FTBERT_INSTANTIATE)

}  // namespace ftbert
