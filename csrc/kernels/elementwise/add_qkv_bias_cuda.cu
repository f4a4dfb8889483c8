// qkv [tokens, qkv_width] + bias -> q, k, v [count, heads, seq, head_size], padding restored as zeros.
#include "core/check.h"
#include "core/dispatch.h"
#include "device/column_walk.cuh"
#include "device/launch.cuh"
#include "device/vector.cuh"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

template <int W, class E>
__global__ void __launch_bounds__(kColumnThreads)
    add_qkv_bias_kernel(const E* __restrict__ qkv, const E* __restrict__ bias, int64_t first_token,
                        const int32_t* __restrict__ cu_seqlens, int64_t rows, int64_t seq, int heads, int kv_heads,
                        int head_size, int packs, E* __restrict__ q, E* __restrict__ k, E* __restrict__ v) {
  using Pack = Packed<E, W>;
  SequenceWalk walk(packs, seq);
  if (walk.idle()) return;
  // A pack never straddles two heads: W divides head_size.
  const int col = walk.pack * W, column_head = col / head_size;
  const bool is_query = column_head < heads, is_key = column_head < heads + kv_heads;
  const int copies = is_query ? 1 : heads / kv_heads;
  const int head = (is_query ? column_head : column_head - heads - (is_key ? 0 : kv_heads)) * copies;
  const int64_t cols = int64_t{packs} * W;
  E* out = (is_query ? q : is_key ? k : v) + head * seq * head_size + col % head_size;
  float b[W] = {};
  if (bias != nullptr) Pack::load(bias + col).to_floats(b);

  for (; walk.row < rows; walk.next(seq)) {
    const int64_t begin = cu_seqlens[walk.sequence], end = cu_seqlens[walk.sequence + 1];
    Pack pack = Pack::zero();
    if (begin + walk.position < end) {
      pack = Pack::load(qkv + (begin + walk.position - first_token) * cols + col);
      float x[W];
      pack.to_floats(x);
#pragma unroll
      for (int w = 0; w < W; ++w) x[w] += b[w];
      pack = Pack::from_floats(x);
    }
    E* const to = out + (walk.sequence * heads * seq + walk.position) * head_size;
    for (int copy = 0; copy < copies; ++copy) pack.store(to + copy * seq * head_size);
  }
}

}  // namespace

template <class Device, class T>
void add_qkv_bias(Context<Device>& context, const Heads& heads, const T* qkv, const T* bias, const Sequences& sequences,
                  T* q, T* k, T* v) {
  const int64_t seq = sequences.max_k, rows = sequences.count * seq, cols = heads.qkv_width();
  if (rows == 0 || cols == 0) return;
  FTBERT_CHECK(cols < (1 << 30), "add_qkv_bias: a row has at most 2^30 elements, got ", cols);
  const auto launch = [&]<int W>() {
    const int64_t packs = cols / W;
    launch_kernel(context, "kernel add_qkv_bias", add_qkv_bias_kernel<W, native_t<T>>,
                  column_blocks(rows, packs, 2, context.sm_count), kColumnThreads, native(qkv), native(bias),
                  sequences.first_q, sequences.cu_q, rows, seq, heads.count, heads.kv, heads.size, packs, native(q),
                  native(k), native(v));
  };
  with_width<kWidth<T>>(vectorizable(kWidth<T>, heads.size, qkv, bias, q, k, v), launch);
}

FTBERT_INSTANTIATE_CUDA(add_qkv_bias, Cuda)

}  // namespace ftbert
