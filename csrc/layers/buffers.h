// What the layers work on beside the hidden states.
#pragma once
#include <cstdint>
#include <type_traits>

#include "core/workspace.h"
#include "gemm/gemm.h"
#include "kernels/kernels.h"
#include "model/config.h"

namespace ftbert {

// How a model's layers compute attention: fused, without a score matrix in memory, or by the general path
// (add_qkv_bias, product, softmax, product, transpose), which takes any head size.
enum class AttentionPath { fused, general };

// Rows that hidden states must have room for: products may compute a few more (kGemmRowSlack), and on a GPU read more
// still (rows_in_tiles).
template <class Device>
constexpr int64_t rows_with_slack(int64_t rows) {
  return std::is_same_v<Device, Cuda> ? rows_in_tiles(rows) : rows + kGemmRowSlack<Device>;
}
// The same of results that no product reads.
template <class Device>
constexpr int64_t unread_rows_with_slack(int64_t rows) {
  return rows + kGemmRowSlack<Device>;
}

// One run's, one after the other; threads with sequences of their own have one each.
template <class T>
struct LayerBuffers {
  T* qkv = nullptr;        // [rows, qkv_width]
  T* attended = nullptr;   // [rows, width]
  T* projected = nullptr;  // [rows, hidden], a block's result before the residual
  // With a convolution: its rows [rows, kernel * hidden], which share memory with qkv, and its result [rows, hidden].
  T *neighbours = nullptr, *convolved = nullptr;
  // [rows, inter], and behind it, where there is a gate, the [rows, 2 * inter] that it reads; shares memory with qkv
  // (on a GPU with attended too), dead by then.
  T* inner = nullptr;
  // Room for [rows, inner] numbers of 8 bits with scales, where `down` reads such, which the product of `up` may not
  // store.
  T* scaled_inner = nullptr;
  ExchangedMoments exchanged_moments;
  AttentionScratch attention_scratch;
  uint32_t* tile_counts = nullptr;  // [kTileCounts] of products of few rows, or nullptr
  void* zeros = nullptr;            // all counts, which who runs the layers clears first
  size_t zero_bytes = 0;
  T *q = nullptr, *k = nullptr, *v = nullptr;  // general path: [sequences, heads, seq, head_size]
  float* scores = nullptr;                     // general path: [sequences, heads, seq, seq]
  T* probabilities = nullptr;                  // general path, T != float
  int64_t general_sequences = 0;               // that the general path works on at a time, at most
  // The batch's, whatever the run.
  T* normed = nullptr;                    // [tokens, hidden], what the next block reads where that is not the stream
  long long* deferred_moments = nullptr;  // deferred norm
};

// The general path takes one sequence at a time, in its own length. How a library's product sums depends on its shape,
// and a sequence's result must not depend on its neighbours. On GPUs lengths are not known where kernels are launched.
template <class Device>
inline constexpr bool kGeneralByLength = std::is_same_v<Device, Cpu>;

struct BufferSizes {
  int64_t rows = 0;        // of the largest run
  int64_t sequences = 0;   // of the batch
  int64_t max_seqlen = 0;  // of the batch
  AttentionPath path = AttentionPath::fused;
  AttentionUse use = AttentionUse::together;
};

// Of two products, one of which may begin before the other has ended.
inline constexpr int64_t kTileCounts = 2;

template <class Device, class T>
LayerBuffers<T> carve_layer_buffers(Workspace& workspace, const ModelConfig& config, const BufferSizes& sizes);

}  // namespace ftbert
