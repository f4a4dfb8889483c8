// A residual added to a product's sums, and the norm of the sums' rows, where they lie in registers: through shared
// memory to C in 16 bits, or from registers in E4M3. Blocks that have different columns of the same rows tell each
// other the mean and the squared deviations of theirs through global memory, without flags or fences.
#pragma once
#include <cstdint>
#include <type_traits>

#include "device/e4m3.cuh"
#include "device/fragment.cuh"
#include "device/mma.cuh"
#include "device/vector.cuh"
#include "device/wgmma.cuh"
#include "kernels/norm/norm_rule.cuh"

namespace ftbert {
namespace {

template <class E>
__device__ float2 unpack_pair(uint32_t bits) {
  typename PairOf<E>::type pair;
  memcpy(&pair, &bits, 4);
  return pair_to_float(pair);
}

// A tile's moments in one access, marked with the product's turn in what squares do not need: the sign, and the last
// seven of 23 bits. 0 is nobody's mark.
inline constexpr uint32_t kMark = 0x8000007fu, kMarks = 255;

__device__ inline uint64_t pack_moments(float mean, float squares, uint32_t mark) {
  return static_cast<uint64_t>((__float_as_uint(squares) & ~kMark) | mark) << 32 | __float_as_uint(mean);
}
__device__ inline bool has_mark(uint64_t moments, uint32_t mark) {
  return (static_cast<uint32_t>(moments >> 32) & kMark) == mark;
}
__device__ inline float mean_of(uint64_t moments) { return __uint_as_float(static_cast<uint32_t>(moments)); }
__device__ inline float squares_of(uint64_t moments) {
  return __uint_as_float(static_cast<uint32_t>(moments >> 32) & ~kMark);
}
__device__ inline void tell(uint64_t* to, uint64_t moments) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(moments) : "memory");
}
__device__ inline uint64_t look(const uint64_t* from) {
  uint64_t moments;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(moments) : "l"(from) : "memory");
  return moments;
}

// The mean of two rows of n columns, eight apart, and what the norm multiplies their deviations by, when all tiles of
// them have told their moments; of rules that are not centred 0, and what it multiplies the rows by. The four lanes of
// a row look at one tile in four, up to kLooks each. work: columns (tiles side by side), mark, eps, row_inverse (1 /
// n).
template <int kTileN, int kLooks, class Rule, class Work>
__device__ void row_moments_of(const Work& work, const uint64_t* moments, float (&mean)[2], float (&scale)[2]) {
  const int mine = threadIdx.x % 4;
  uint64_t seen[2][kLooks];
  bool all;
  do {
    all = true;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < kLooks; ++i)
        if (mine + 4 * i < work.columns) seen[r][i] = look(moments + r * 8 * work.columns + mine + 4 * i);
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < kLooks; ++i) all &= mine + 4 * i >= work.columns || has_mark(seen[r][i], work.mark);
  } while (!all);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float total = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < kLooks; ++i)
      if (mine + 4 * i < work.columns) total += mean_of(seen[r][i]);
    mean[r] = Rule::kCentred ? reduce<4>(total, Sum()) * (kTileN * work.row_inverse) : 0;
#pragma unroll
    for (int i = 0; i < kLooks; ++i)
      if (mine + 4 * i < work.columns) {
        const float d = mean_of(seen[r][i]) - mean[r];
        squares += Rule::kCentred ? squares_of(seen[r][i]) + kTileN * d * d : squares_of(seen[r][i]);
      }
    scale[r] = inverse_root_mean<4>(squares, work.row_inverse, work.eps);
  }
}

// sum += residual for 16 rows of a warp, and the mean and the squared deviations of each of a thread's two; of rules
// that are not centred 0 and the squares.
template <class E, class Shape, class Rule>
__device__ void add_residual(float (&sum)[Shape::kTileN / 8][4], uint32_t tile, float (&mean)[2], float (&squares)[2]) {
  constexpr int kTileN = Shape::kTileN;
  const uint32_t row = matrix_row(tile);
  uint32_t bits[2][4];  // 16 columns, and the next ones on their way
  const auto load = [&](int j) {
    load_matrices(bits[j / 2 % 2], (row ^ (j % 8 * 16)) + j / 8 * (Shape::kTileM * 128));
  };
  float total[2] = {};
  load(0);
#pragma unroll
  for (int j = 0; j < kTileN / 8; j += 2) {
    if (j + 2 < kTileN / 8) load(j + 2);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const float2 r = unpack_pair<E>(bits[j / 2 % 2][p]);
      float* const s = sum[j + p / 2] + p % 2 * 2;
      s[0] += r.x, s[1] += r.y;
      total[p % 2] += Rule::kCentred ? s[0] + s[1] : s[0] * s[0] + s[1] * s[1];
    }
  }
  if constexpr (Rule::kCentred) {
#pragma unroll
    for (int r = 0; r < 2; ++r) mean[r] = reduce<4>(total[r], Sum()) * (1.0f / kTileN);
    float partial[2][2] = {};
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float d = sum[j][i] - mean[i / 2];
        partial[i / 2][i % 2] += d * d;
      }
#pragma unroll
    for (int r = 0; r < 2; ++r) squares[r] = reduce<4>(partial[r][0] + partial[r][1], Sum());
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r) mean[r] = 0, squares[r] = reduce<4>(total[r], Sum());
  }
}

// One number of a row. shift: -mean * scale.
template <class E, class Rule>
__device__ float normed_sum(const Rule& rule, float x, float scale, float shift, float gamma, float beta) {
  if constexpr (Rule::kCentred)
    return (x * scale + shift) * gamma + beta;
  else
    return rule.template apply<E>(x, scale, gamma, beta);
}

// In place, by a rule that is not centred, 8 * kEights columns of one of a lane's rows: accumulators from `first` on.
// gamma [8 * kEights]; inverse: 1 / (8 * kEights).
template <int kEights, class E, class Rule, int kAll>
__device__ void norm_columns(const Rule& rule, const E* gamma, float inverse, float (&sums)[kAll][4], int first,
                             int r) {
  static_assert(!Rule::kCentred);
  float squares = 0;
#pragma unroll
  for (int j = 0; j < kEights; ++j) {
    const float* const s = sums[first + j] + 2 * r;
    squares += s[0] * s[0] + s[1] * s[1];
  }
  const float scale = inverse_root_mean<4>(squares, inverse, rule.eps);
#pragma unroll
  for (int j = 0; j < kEights; ++j) {
    float g[2];
    Packed<E, 2>::load(gamma + j * 8 + Fragment::column()).to_floats(g);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float& x = sums[first + j][2 * r + c];
      x = rule.template apply<E>(x, scale, g[c], 0.0f);
    }
  }
}

// What the rule makes of the sums, rounded, to shared memory; of NoRule the sums themselves. store(block) when 64
// columns are there. vectors: for two columns both gammas, both betas.
template <class E, class Shape, class Rule, class Store>
__device__ void normalize(const Rule& rule, const float (&sum)[Shape::kHalves][Shape::kTileN / 8][4],
                          const float4* vectors, const float (&mean)[Shape::kHalves][2],
                          const float (&scale)[Shape::kHalves][2], uint32_t tile, const Store& store) {
  constexpr int kHalves = Shape::kHalves;
  const uint32_t row = matrix_row(tile);
  float shift[kHalves][2];
#pragma unroll
  for (int half = 0; half < kHalves; ++half)
#pragma unroll
    for (int r = 0; r < 2; ++r) shift[half][r] = -mean[half][r] * scale[half][r];
#pragma unroll
  for (int j = 0; j < Shape::kTileN / 8; j += 2) {
    uint32_t packed[kHalves][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 v = vectors[(j + i) * 4 + threadIdx.x % 4];
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float* const s = sum[half][j + i] + 2 * r;
          if constexpr (std::is_same_v<Rule, NoRule>)
            packed[half][2 * i + r] = pack_pair<E>(s[0], s[1]);
          else
            packed[half][2 * i + r] = pack_pair<E>(normed_sum<E>(rule, s[0], scale[half][r], shift[half][r], v.x, v.z),
                                                   normed_sum<E>(rule, s[1], scale[half][r], shift[half][r], v.y, v.w));
        }
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
      store_matrices((row ^ (j % 8 * 16)) + j / 8 * (Shape::kTileM * 128) + half * (64 * 128), packed[half][0],
                     packed[half][1], packed[half][2], packed[half][3]);
    if (j % 8 == 6) store(j / 8);
  }
}

// What the rule makes of the sums in place and not rounded, for results of more than one type.
template <class E, class Shape, class Rule>
__device__ void apply_norm(const Rule& rule, float (&sum)[Shape::kHalves][Shape::kTileN / 8][4], const float4* vectors,
                           const float (&mean)[Shape::kHalves][2], const float (&scale)[Shape::kHalves][2]) {
#pragma unroll
  for (int j = 0; j < Shape::kTileN / 8; ++j) {
    const float4 v = vectors[j * 4 + threadIdx.x % 4];
#pragma unroll
    for (int half = 0; half < Shape::kHalves; ++half)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& s = sum[half][j][i];
        const float by = scale[half][i / 2];
        s = normed_sum<E>(rule, s, by, -mean[half][i / 2] * by, i % 2 ? v.y : v.x, i % 2 ? v.w : v.z);
      }
  }
}

// 4x4 words of four neighbouring lanes: word w of lane l goes to lane w as its word l.
__device__ inline void transpose_words(uint32_t (&word)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t came = __shfl_xor_sync(~0u, upper ? word[i] : word[i | bit], bit);
      if (upper)
        word[i] = came;
      else
        word[i | bit] = came;
    }
  }
}

// Norms in E4M3 to memory: `to` is the warp's row lane / 4 at the tile's first column, of n columns a row; from there
// on there are `rows` rows. inverse: of their scale. Four lanes store 64 columns of a row, 16 bytes each.
template <class Shape>
__device__ void store_e4m3_norm(const float (&norm)[Shape::kHalves][Shape::kTileN / 8][4], float inverse, uint8_t* to,
                                int n, int64_t rows) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < Shape::kHalves; ++half)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = half * 64 + r * 8;
#pragma unroll
      for (int block = 0; block < Shape::kTileN / 64; ++block) {
        uint32_t word[4];  // 16 columns: of each eight this lane's two
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* const low = norm[half][block * 8 + 2 * i] + 2 * r;
          const float* const high = norm[half][block * 8 + 2 * i + 1] + 2 * r;
          word[i] = to_e4m3(low[0] * inverse, low[1] * inverse, high[0] * inverse, high[1] * inverse);
        }
        transpose_words(word);
        const uint4 stored = {__byte_perm(word[0], word[1], 0x5410), __byte_perm(word[2], word[3], 0x5410),
                              __byte_perm(word[0], word[1], 0x7632), __byte_perm(word[2], word[3], 0x7632)};
        if (row < rows) *reinterpret_cast<uint4*>(to + int64_t{row} * n + block * 64 + lane * 16) = stored;
      }
    }
}

}  // namespace
}  // namespace ftbert
