// What the fused attention kernels share: which queries a CTA takes, tiles in shared memory, the running softmax, and
// the way out. Accumulators are laid out as mma.m16n8k16 leaves them: lane holds rows lane/4 and lane/4 + 8, columns
// 8j + 2*(lane%4) and the next.
#pragma once
#include "device/e4m3_rows.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/vector.cuh"

namespace ftbert {
namespace {

constexpr int kTileKeys = 64;
constexpr float kNoKey = -1e30f;  // the largest score of a row that has seen none

// A row's sums of probabilities times values: eights of columns, and behind the head's one of ones, so that there
// stands the sum of the probabilities, as they are rounded.
template <int kHeadSize>
using RowSums = float[kHeadSize / 8 + 1][4];

// Two ones.
template <class E>
inline constexpr uint32_t kOnes = std::is_same_v<E, __half> ? 0x3C003C00 : 0x3F803F80;

// How a block reads where its sequence begins and ends: through the multiprocessor's cache; past it; or so while the
// kernel ahead ends, where they were there before that began (the cache may have older ones).
enum class OffsetReads { kCached, kUncached, kEarly };

// The part of the work that this CTA has.
struct AttentionBlock {
  int sequence, head, start, length, first_query;

  __device__ AttentionBlock(const int32_t* cu_seqlens, int heads, int query_blocks, int queries, bool cached = true) {
    sequence = blockIdx.x / query_blocks / heads;
    const int32_t* const at = cu_seqlens + sequence;
    head = blockIdx.x / query_blocks % heads;
    start = cached ? at[0] : __ldcg(at);
    length = (cached ? at[1] : __ldcg(at + 1)) - start;
    first_query = blockIdx.x % query_blocks * queries;
  }

  __device__ AttentionBlock(int sequence, int head, int start, int length, int first_query)
      : sequence(sequence), head(head), start(start), length(length), first_query(first_query) {}

  // The same with wait_for_inputs.
  static __device__ AttentionBlock after_wait(const int32_t* cu_seqlens, OffsetReads reads, int heads, int query_blocks,
                                              int queries) {
    if (reads != OffsetReads::kEarly) wait_for_inputs();
    if (reads == OffsetReads::kCached) return AttentionBlock(cu_seqlens, heads, query_blocks, queries);
    const AttentionBlock block(cu_seqlens, heads, query_blocks, queries, false);
    if (reads == OffsetReads::kEarly) wait_for_inputs();
    return block;
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

template <class E>
using Pair = typename PairOf<E>::type;

template <class E>
__device__ Pair<E> as_pair(uint32_t bits) {
  return *reinterpret_cast<const Pair<E>*>(&bits);
}

// Whether one of two powers of two is above 2^8. A NaN need not be noticed: it reaches the sums as it is.
template <class E>
__device__ bool too_large(Pair<E> pair) {
  constexpr uint32_t kMost = std::is_same_v<E, __half> ? 0x5C00 : 0x4380;
  const uint32_t bits = *reinterpret_cast<const uint32_t*>(&pair);
  return (bits & 0xFFFF) > kMost || bits >> 16 > kMost;
}

// Of this lane's two rows, with scores times scale * log2(e): what is subtracted from them before they become
// powers of two.
struct RowState {
  float subtracted[2] = {-INFINITY, -INFINITY};

  // Of a row's first tile: its maximum there. Where it may have no key there, the power of the first it has is too
  // large for what is subtracted until then, and that of a key that weighs nothing is 0.
  template <bool kHasKey = true, int kKeys8>
  __device__ void begin(const float (&score)[kKeys8][4], float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      subtracted[r] = row_maximum(score, r) * scale_log2;
      if (!kHasKey) subtracted[r] = fmaxf(subtracted[r], kNoKey);
    }
  }

  // p: 2^(scale_log2 * score - subtracted) as the A operand of the next product. total: float[2], the sums of this
  // lane's, if they are wanted.
  template <class E, int kKeys16, class... Total>
  __device__ void powers(const float (&score)[2 * kKeys16][4], uint32_t (&p)[kKeys16][4], float scale_log2,
                         Total&... total) const {
    ((total[0] = total[1] = 0), ...);
#pragma unroll
    for (int j = 0; j < 2 * kKeys16; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float power[2] = {fast_exp2(score[j][2 * r] * scale_log2 - subtracted[r]),
                                fast_exp2(score[j][2 * r + 1] * scale_log2 - subtracted[r])};
        p[j / 2][j % 2 * 2 + r] = pack_pair<E>(power[0], power[1]);
        ((total[r] += power[0] + power[1]), ...);
      }
  }

  // In two parts, for one that has the scores while the sums of the tile before are still being made. Brings the row to
  // its new maximum where a power would be above 2^8, most often nowhere in the warp: settle() waits for the sums.
  template <class Settle, int kKeys8, int kColumns8>
  __device__ void follow(const Settle& settle, const float (&score)[kKeys8][4], float (&sum)[kColumns8][4],
                         float (&total)[2], float scale_log2) {
    float most[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) most[r] = lane_maximum(score, r) * scale_log2;
    if (!__any_sync(~0u, most[0] - subtracted[0] > 8 || most[1] - subtracted[1] > 8)) return;
    settle();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float now = row_maximum(score, r) * scale_log2;
      const bool larger = now - subtracted[r] > 8;  // of this row alone: others do not depend on it
      const float correction = larger ? fast_exp2(subtracted[r] - now) : 1.0f;
      subtracted[r] = larger ? now : subtracted[r];
#pragma unroll
      for (int d = 0; d < kColumns8; ++d) {
        sum[d][2 * r] *= correction;
        sum[d][2 * r + 1] *= correction;
      }
      total[r] *= correction;
    }
  }
  // Scores become their powers, which are added to total.
  template <int kKeys8>
  __device__ void raise(float (&score)[kKeys8][4], float (&total)[2], float scale_log2) const {
#pragma unroll
    for (int j = 0; j < kKeys8; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        score[j][c] = fast_exp2(score[j][c] * scale_log2 - subtracted[c / 2]);
        total[c / 2] += score[j][c];
      }
  }

  // The same, before their maximum is known: a larger score than the one subtracted does not matter while its power is
  // far from any limit. Where a power may be too large after all, most often nowhere in the warp, the row is brought to
  // its new maximum, its sum so far too. total: float[2], of the powers, where sum has no column of it. Then what a
  // lane adds to it tells of too large powers, else the powers do.
  template <class E, int kKeys16, int kColumns8, class... Total>
  __device__ void probabilities(const float (&score)[2 * kKeys16][4], uint32_t (&p)[kKeys16][4],
                                float (&sum)[kColumns8][4], float scale_log2, Total&... total) {
    float here[2];
    powers<E>(score, p, scale_log2, here);
    bool large[2];
    if constexpr (sizeof...(Total) > 0) {
      for (int r = 0; r < 2; ++r) large[r] = here[r] > 256;
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        Pair<E> most = __hmax2(as_pair<E>(p[0][r]), as_pair<E>(p[0][2 + r]));
#pragma unroll
        for (int j = 1; j < kKeys16; ++j) most = __hmax2(most, __hmax2(as_pair<E>(p[j][r]), as_pair<E>(p[j][2 + r])));
        large[r] = too_large<E>(most);
      }
    }
    if (!__any_sync(~0u, large[0] || large[1])) {
      ((total[0] += here[0], total[1] += here[1]), ...);
      return;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const unsigned lanes = __ballot_sync(~0u, large[r]);
      const bool larger = lanes >> (threadIdx.x % 32 / 4 * 4) & 0xF;  // of this row alone: others do not depend on it
      const float now = row_maximum(score, r) * scale_log2;
      const float correction = larger ? fast_exp2(subtracted[r] - now) : 1.0f;
      subtracted[r] = larger ? now : subtracted[r];
#pragma unroll
      for (int d = 0; d < kColumns8; ++d) {
        sum[d][2 * r] *= correction;
        sum[d][2 * r + 1] *= correction;
      }
      ((total[r] *= correction), ...);
    }
    powers<E>(score, p, scale_log2, here);
    ((total[0] += here[0], total[1] += here[1]), ...);
  }

 private:
  template <int kKeys8>
  __device__ static float lane_maximum(const float (&score)[kKeys8][4], int r) {
    float most = fmaxf(score[0][2 * r], score[0][2 * r + 1]);
#pragma unroll
    for (int j = 1; j < kKeys8; ++j) most = fmaxf(most, fmaxf(score[j][2 * r], score[j][2 * r + 1]));
    return most;
  }
  template <int kKeys8>
  __device__ static float row_maximum(const float (&score)[kKeys8][4], int r) {
    float most = lane_maximum(score, r);
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    return fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  }
};

// What some of the keys leave for 64 queries, in shared memory: sums and totals of 2^(score - subtracted).
template <int kHeadSize>
struct PartialRows {
  float sum[64][kHeadSize + 4];  // rows apart from the banks
  float2 state[64];              // subtracted, total

  __device__ void put(int first_row, int lane, const RowSums<kHeadSize>& from, const RowState& rows) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + lane / 4 + 8 * r;
      if (lane % 4 == 0) state[row] = make_float2(rows.subtracted[r], from[kHeadSize / 8][2 * r]);
#pragma unroll
      for (int d = 0; d < kHeadSize / 8; ++d)
        *reinterpret_cast<float2*>(&sum[row][d * 8 + lane % 4 * 2]) = make_float2(from[d][2 * r], from[d][2 * r + 1]);
    }
  }
};

// sum / total of 16 rows into shared memory, so that store_rows can write whole 16-byte chunks; 0 of a row without
// keys. totals: of two rows, where sum has no column of them.
template <class E, int kHeadSize, bool kHasKey = true, int kColumns8>
__device__ void stage_rows(char* memory, int first_row, int lane, const float (&sum)[kColumns8][4],
                           const float* totals = nullptr) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float total;
    if constexpr (8 * kColumns8 > kHeadSize)
      total = sum[kHeadSize / 8][2 * r];
    else
      total = totals[r];
    const float inverse = kHasKey || total != 0 ? 1.0f / total : 0.0f;
#pragma unroll
    for (int d = 0; d < kHeadSize / 8; ++d) {
      const uint32_t offset = swizzled<kHeadSize>(0, first_row + lane / 4 + 8 * r, d) + lane % 4 * 4;
      *reinterpret_cast<uint32_t*>(memory + offset) =
          pack_pair<E>(sum[d][2 * r] * inverse, sum[d][2 * r + 1] * inverse);
    }
  }
}

// Rows [first_row, first_row + kRows) of the block to out [.., width], as many as are `real`; by one warp.
template <class E, int kHeadSize, int kRows>
__device__ void store_rows(const char* memory, int first_row, int lane, int real, E* out, int64_t width) {
  constexpr int kChunks = kHeadSize / 8;
  real = min(real, kRows);
  for (int i = lane; i < real * kChunks; i += 32) {
    const int row = first_row + i / kChunks, chunk = i % kChunks;
    *reinterpret_cast<uint4*>(out + row * width + chunk * 8) =
        *reinterpret_cast<const uint4*>(memory + swizzled<kHeadSize>(0, row, chunk));
  }
}
// The same to `to`, in E4M3; nothing to out.
template <class E, int kHeadSize, int kRows>
__device__ void store_rows(const char* memory, int first_row, int lane, int real, E*, int64_t width, E4m3Rows to) {
  constexpr int kChunks = kHeadSize / 8;
  to.read_scale();
  real = min(real, kRows);
  for (int i = lane; i < real * kChunks; i += 32) {
    const int row = first_row + i / kChunks, chunk = i % kChunks;
    float x[8];
    Packed<E, 8>{*reinterpret_cast<const uint4*>(memory + swizzled<kHeadSize>(0, row, chunk))}.to_floats(x);
    put(x, to, row * width + chunk * 8);
  }
}

}  // namespace
}  // namespace ftbert
