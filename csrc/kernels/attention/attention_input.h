// What the attention kernels of both paths get.
#pragma once
#include <cstdint>

#include "core/operand.h"
#include "core/types.h"

namespace ftbert {

// A layer's heads: `count` of queries, `kv` of keys and values, each of which serves count / kv query heads side by
// side.
struct Heads {
  int64_t count = 0, kv = 0, size = 0;
  float scale = 0;  // of a score, before a bias is added

  FTBERT_HOST_DEVICE int64_t width() const { return count * size; }  // columns of q and of the result
  FTBERT_HOST_DEVICE int64_t kv_width() const { return kv * size; }  // of k, and of v
  FTBERT_HOST_DEVICE int64_t qkv_width() const { return width() + 2 * kv_width(); }
};

// Sizes of heads, of which something is compiled for each.
template <int... kSizes>
struct HeadSizes {
  static constexpr bool has(int64_t size) { return ((size == kSizes) || ...); }
  // run.operator()<size>()
  template <class Run>
  static void with(int64_t size, const Run& run) {
    ((size == kSizes ? run.template operator()<kSizes>() : void()), ...);
  }
};
// Of the fused path's kernels on GPUs.
using FusedHeads = HeadSizes<32, 64, 80, 96, 128, 256>;

// Row i begins at data + i * stride, in elements.
struct Rows {
  const void* data = nullptr;
  int64_t stride = 0;
};

// q [rows, width], k and v [rows, kv_width], of one type: columns of one matrix, tensors of their own, a cache.
struct QueriesKeysValues {
  DType dtype = DType::fp32;
  Rows q, k, v;

  // Side by side in the rows of qkv [rows, qkv_width].
  static QueriesKeysValues side_by_side(const Operand& qkv, const Heads& heads) {
    const int64_t stride = heads.qkv_width(), bytes = bytes_of(qkv.dtype());
    const auto* q = static_cast<const char*>(qkv.data);
    const auto *k = q + heads.width() * bytes, *v = k + heads.kv_width() * bytes;
    return {qkv.dtype(), {q, stride}, {k, stride}, {v, stride}};
  }
};

// The keys before a sequence's first query: query i stands at key i + this.
template <class I>
FTBERT_HOST_DEVICE constexpr I keys_ahead(I queries, I keys) {
  return keys > queries ? keys - queries : 0;
}

// Sequence i has the queries of tokens [cu_q[i], cu_q[i+1]) and the keys of [cu_k[i], end_of_keys()[i]). The last query
// is the last key; of more queries than keys the first is the first, and those behind the last key attend and are not
// attended to (keys_ahead). All may point at the first of a run of sequences: token t lies in row t - first_q of q and
// of the result, and in row t - first_k of k and v.
struct Sequences {
  const int32_t *cu_q = nullptr, *cu_k = nullptr;  // [count+1]; cu_k [count] beside end_k
  int64_t count = 0;
  int64_t max_q = 0;  // of each sequence so many queries at least are computed, the first; others are left as they were
  int64_t max_k = 0;  // upper bound of the longest's keys and queries
  int64_t first_q = 0, first_k = 0;
  int64_t rows = 0;                // of q; on a GPU an upper bound
  int64_t rows_k = 0;              // of k and v; on a GPU an upper bound
  bool early = true;               // the offsets were there before the kernel ahead began (device/launch.cuh)
  const int32_t* end_k = nullptr;  // [count], where the keys of a sequence end before those of the next begin

  const int32_t* end_of_keys() const { return end_k ? end_k : cu_k + 1; }
  // Without the first `skipped` sequences.
  Sequences from(int64_t skipped) const {
    Sequences rest = *this;
    rest.cu_q += skipped, rest.cu_k += skipped;
    if (end_k) rest.end_k += skipped;
    return rest;
  }

  // Each token is a query and a key.
  static Sequences of_tokens(const int32_t* cu_seqlens, int64_t count, int64_t max_seqlen, int64_t rows) {
    return {cu_seqlens, cu_seqlens, count, max_seqlen, max_seqlen, 0, 0, rows, rows};
  }
};

}  // namespace ftbert
