// What the fused attention kernels share: which queries a CTA takes, tiles in shared memory, the running softmax, and
// the way out. Accumulators are laid out as mma.m16n8k16 leaves them: lane holds rows lane/4 and lane/4 + 8, columns
// 8j + 2*(lane%4) and the next.
#pragma once
#include "kernels/launch.cuh"
#include "kernels/mma.cuh"
#include "kernels/tile_loader.cuh"
#include "kernels/vector.cuh"

namespace ftbert {
namespace {

constexpr int kTileKeys = 64;

// The part of the work that this CTA has.
struct AttentionBlock {
  int head, start, length, first_query;

  __device__ AttentionBlock(const int32_t* cu_seqlens, int heads, int query_blocks, int queries) {
    const int sequence = blockIdx.x / query_blocks / heads;
    head = blockIdx.x / query_blocks % heads;
    start = cu_seqlens[sequence];
    length = cu_seqlens[sequence + 1] - start;
    first_query = blockIdx.x % query_blocks * queries;
  }
};

// Keys from `valid` on weigh nothing.
template <int kKeys8>
__device__ void mask_scores(float (&score)[kKeys8][4], int valid, int lane) {
  if (valid >= 8 * kKeys8) return;
#pragma unroll
  for (int j = 0; j < kKeys8; ++j)
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (j * 8 + lane % 4 * 2 + c % 2 >= valid) score[j][c] = -INFINITY;
}

// Of this lane's two rows: the largest score so far and its own share of the sum of e^(score - max).
struct RowState {
  float most[2] = {-INFINITY, -INFINITY}, total[2] = {};

  // score becomes e^(scale * (score - max)); the sums so far are brought to the new maximum.
  template <int kKeys8, int kColumns8>
  __device__ void update(float (&score)[kKeys8][4], float (&sum)[kColumns8][4], float scale_log2) {
    float scaled[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float now = most[r];
#pragma unroll
      for (int j = 0; j < kKeys8; ++j) now = fmaxf(now, fmaxf(score[j][2 * r], score[j][2 * r + 1]));
      now = fmaxf(now, __shfl_xor_sync(0xffffffff, now, 1));
      now = fmaxf(now, __shfl_xor_sync(0xffffffff, now, 2));
      scaled[r] = now * scale_log2;
      const float correction = fast_exp2(most[r] * scale_log2 - scaled[r]);
      most[r] = now;
      total[r] *= correction;
#pragma unroll
      for (int d = 0; d < kColumns8; ++d) {
        sum[d][2 * r] *= correction;
        sum[d][2 * r + 1] *= correction;
      }
    }
#pragma unroll
    for (int j = 0; j < kKeys8; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        score[j][c] = fast_exp2(score[j][c] * scale_log2 - scaled[c / 2]);
        total[c / 2] += score[j][c];
      }
    }
  }

  __device__ float inverse_total(int r) const {
    float all = total[r] + __shfl_xor_sync(0xffffffff, total[r], 1);
    all += __shfl_xor_sync(0xffffffff, all, 2);
    return 1.0f / all;
  }
};

// Columns [16j, 16j+16) of the probabilities as the A operand of the next product.
template <class E, int kKeys8>
__device__ void pack_probabilities(const float (&score)[kKeys8][4], int j, uint32_t (&p)[4]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) p[c] = pack_pair<E>(score[2 * j + c / 2][c % 2 * 2], score[2 * j + c / 2][c % 2 * 2 + 1]);
}

// sum / total of 16 rows into shared memory, so that store_rows can write whole 16-byte chunks.
template <class E, int kHeadSize>
__device__ void stage_rows(char* memory, int first_row, int lane, const float (&sum)[kHeadSize / 8][4],
                           const RowState& state) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float inverse = state.inverse_total(r);
#pragma unroll
    for (int d = 0; d < kHeadSize / 8; ++d) {
      const uint32_t offset = swizzled<kHeadSize>(0, first_row + lane / 4 + 8 * r, d) + lane % 4 * 4;
      *reinterpret_cast<uint32_t*>(memory + offset) =
          pack_pair<E>(sum[d][2 * r] * inverse, sum[d][2 * r + 1] * inverse);
    }
  }
}

// Rows [first_row, first_row + kRows) of the block to out [.., hidden], as many as are `real`; by one warp.
template <class E, int kHeadSize, int kRows>
__device__ void store_rows(const char* memory, int first_row, int lane, int real, E* out, int64_t hidden) {
  constexpr int kChunks = kHeadSize / 8;
  real = min(real, kRows);
  for (int i = lane; i < real * kChunks; i += 32) {
    const int row = first_row + i / kChunks, chunk = i % kChunks;
    *reinterpret_cast<uint4*>(out + row * hidden + chunk * 8) =
        *reinterpret_cast<const uint4*>(memory + swizzled<kHeadSize>(0, row, chunk));
  }
}

}  // namespace
}  // namespace ftbert
