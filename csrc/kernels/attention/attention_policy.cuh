// Which keys a block's queries see and where q, k and v lie: the policies that a fused kernel is compiled for. A block
// goes through tiles of keys from the first that one of its queries sees; "places" count from there.
#pragma once
#include <type_traits>

#include "kernels/attention/attention_tile.cuh"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

// Places [begin, end) of keys; none where end <= begin.
struct KeyRange {
  int begin, end;

  __device__ bool has(int key) const { return begin <= key && key < end; }
  __device__ bool meets(int first, int count) const { return begin < first + count && first < end; }
  __device__ bool covers(int first, int count) const { return begin <= first && first + count <= end; }
};

// Every query sees all keys of its sequence. q, k and v lie side by side in qkv [tokens, 3*width], each token is a
// query and a key, each head of queries has its own of keys.
template <class E>
struct WholeSequence {
  static constexpr bool kWhole = true;
  const E *q, *k, *v;  // of this head: the sequence's first query; the first key that the block's queries see
  int64_t q_stride, k_stride, v_stride;
  int first_key, keys;  // the first one's token, and how many of them the block's queries see

  __device__ WholeSequence(const AttentionBlock& block, int, int head_size, const E* qkv, int64_t first_token,
                           int64_t width)
      : q_stride(3 * width), k_stride(3 * width), v_stride(3 * width), first_key(block.start), keys(block.length) {
    q = qkv + (block.start - first_token) * q_stride + block.head * head_size;
    k = q + width;
    v = k + width;
  }
  __device__ int tokens() const { return keys; }  // from the first key on
  // The keys that one of the queries from `first` to `last` sees.
  __device__ KeyRange of(int, int) const { return {0, keys}; }
  __device__ int place(int query) const { return query; }
  // score: of 16 queries from `query` on with the keys from `first` on. Those that a query does not see weigh nothing.
  template <int kKeys8>
  __device__ void mask(float (&score)[kKeys8][4], int, int first, int lane) const {
    mask_scores(score, keys - first, lane);
  }
};

// A kernel's parameters behind those of whole sequences, whose qkv then is q.
template <class E>
struct WindowParameters {
  const E *k, *v;
  int64_t q_stride, k_stride, v_stride, first_k;
  const int32_t *begin_k, *end_k;
  int shared;  // heads of queries that read one of keys and values
  Window window;
};

// A query sees the keys of its window, perhaps none of its block's first tile.
struct KeysInWindow {
  Window window;
  int start, length, ahead, before;  // keys of the sequence: the first's token, count, before query 0, before place 0
  int keys;                          // that the block's queries see
  int queries;                       // of the sequence

  // of_block: its queries.
  __device__ KeysInWindow(const AttentionBlock& block, int of_block, const int32_t* begin_k, const int32_t* end_k,
                          const Window& window)
      : window(window), start(begin_k[block.sequence]), queries(block.length) {
    const int end_query = min(block.first_query + of_block, block.length);
    length = end_k[block.sequence] - start;
    ahead = keys_ahead(block.length, length);
    before = begin(block.first_query);
    keys = window.end(end_query - 1 + ahead, length) - before;
  }
  // Columns are of keys and of queries, which may be more.
  __device__ int tokens() const { return max(keys, queries + ahead - before); }
  // The first key that a query sees.
  __device__ int begin(int query) const { return window.begin(query + ahead); }
  __device__ KeyRange of(int first, int last) const {
    return {begin(first) - before, min(window.end(last + ahead, length) - before, keys)};
  }
  __device__ int place(int query) const { return query + ahead - before; }
  // score: of 16 queries from `query` on with the keys from `first` on.
  template <int kKeys8>
  __device__ void mask(float (&score)[kKeys8][4], int query, int first, int lane) const {
    if (of(query + 15, query).covers(first, 8 * kKeys8)) return;  // what the last one sees from the first on, all do
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = query + lane / 4 + 8 * r;
      const KeyRange seen = of(row, row);
#pragma unroll
      for (int j = 0; j < kKeys8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (!seen.has(first + j * 8 + lane % 4 * 2 + c)) score[j][2 * r + c] = -INFINITY;
    }
  }
};

// The same, and where q, k and v lie.
template <class E>
struct InWindow : KeysInWindow {
  static constexpr bool kWhole = false;
  const E *q, *k, *v;
  int64_t q_stride, k_stride, v_stride;
  int first_key;

  __device__ InWindow(const AttentionBlock& block, int queries, int head_size, const E* all_q, int64_t first_q, int64_t,
                      const WindowParameters<E>& from)
      : KeysInWindow(block, queries, from.begin_k, from.end_k, from.window),
        q_stride(from.q_stride),
        k_stride(from.k_stride),
        v_stride(from.v_stride),
        first_key(start + before) {
    const int64_t row = first_key - from.first_k;
    const int column = block.head / from.shared * head_size;
    q = all_q + (block.start - first_q) * q_stride + block.head * head_size;
    k = from.k + row * k_stride + column;
    v = from.v + row * v_stride + column;
  }
};

// What a kernel has of its policy: WholeSequence without parameters, InWindow by WindowParameters.
template <class E, class... Parameters>
using SeenKeys = std::conditional_t<sizeof...(Parameters) == 0, WholeSequence<E>, InWindow<E>>;

}  // namespace
}  // namespace ftbert
