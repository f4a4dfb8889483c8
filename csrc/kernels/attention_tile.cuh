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

// Of this lane's two rows, with scores times log2(e) / sqrt(head size): what is subtracted from them, and its own share
// of the sum of 2^(score - subtracted), even columns and odd ones apart.
struct RowState {
  // A larger score than the one subtracted does not matter while 2^(what it is larger by) is far from any limit: a row
  // is brought to a new maximum only where that is larger by more than this. Most often none of a warp's rows is.
  static constexpr float kSlack = 8.0f;

  float subtracted[2] = {-INFINITY, -INFINITY}, total[2][2] = {};

  // Looks at new scores, and brings the sums so far to what is subtracted from now on.
  template <int kKeys8, int kColumns8>
  __device__ void look_at(const float (&score)[kKeys8][4], float (&sum)[kColumns8][4], float scale_log2) {
    float most[2][2];
#pragma unroll
    for (int c = 0; c < 4; ++c) most[c / 2][c % 2] = fmaxf(score[0][c], score[1][c]);
#pragma unroll
    for (int j = 2; j < kKeys8; j += 2)
#pragma unroll
      for (int c = 0; c < 4; ++c) most[c / 2][c % 2] = fmaxf(most[c / 2][c % 2], fmaxf(score[j][c], score[j + 1][c]));
    float now[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      now[r] = fmaxf(most[r][0], most[r][1]);
      now[r] = fmaxf(now[r], __shfl_xor_sync(0xffffffff, now[r], 1));
      now[r] = fmaxf(now[r], __shfl_xor_sync(0xffffffff, now[r], 2)) * scale_log2;
    }
    if (!__any_sync(0xffffffff, now[0] > subtracted[0] + kSlack || now[1] > subtracted[1] + kSlack)) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool larger = now[r] > subtracted[r] + kSlack;  // of this row alone: others may be another sequence's
      const float correction = larger ? fast_exp2(subtracted[r] - now[r]) : 1.0f;
      subtracted[r] = larger ? now[r] : subtracted[r];
      total[r][0] *= correction;
      total[r][1] *= correction;
#pragma unroll
      for (int d = 0; d < kColumns8; ++d) {
        sum[d][2 * r] *= correction;
        sum[d][2 * r + 1] *= correction;
      }
    }
  }

  // Scores of keys [8*kFirst, 8*kLast) become 2^(scale_log2 * score - subtracted).
  template <int kFirst, int kLast, int kKeys8>
  __device__ void exponentiate(float (&score)[kKeys8][4], float scale_log2) {
#pragma unroll
    for (int j = kFirst; j < kLast; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        score[j][c] = fast_exp2(score[j][c] * scale_log2 - subtracted[c / 2]);
        total[c / 2][c % 2] += score[j][c];
      }
    }
  }

  __device__ float row_total(int r) const {
    float all = total[r][0] + total[r][1];
    all += __shfl_xor_sync(0xffffffff, all, 1);
    return all + __shfl_xor_sync(0xffffffff, all, 2);
  }
};

// What some of the keys leave for 64 queries, in shared memory: sums and totals of 2^(score - subtracted).
template <int kHeadSize>
struct PartialRows {
  float sum[64][kHeadSize + 4];  // rows apart from the banks
  float2 state[64];              // subtracted, total

  __device__ void put(int first_row, int lane, const float (&from)[kHeadSize / 8][4], const RowState& rows) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + lane / 4 + 8 * r;
      const float total = rows.row_total(r);
      if (lane % 4 == 0) state[row] = make_float2(rows.subtracted[r], total);
#pragma unroll
      for (int d = 0; d < kHeadSize / 8; ++d)
        *reinterpret_cast<float2*>(&sum[row][d * 8 + lane % 4 * 2]) = make_float2(from[d][2 * r], from[d][2 * r + 1]);
    }
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
    const float inverse = 1.0f / state.row_total(r);
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
