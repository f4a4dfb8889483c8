// A tile's float sums in registers with its residual in shared memory: added, normalised, and stored.
#pragma once
#include <cstdint>
#include <type_traits>

#include "device/e4m3.cuh"
#include "device/mma.cuh"
#include "device/vector.cuh"
#include "kernels/norm/norm_rule.cuh"

namespace ftbert {
namespace {

template <class E>
__device__ float2 unpack_pair(uint32_t bits) {
  typename PairOf<E>::type pair;
  memcpy(&pair, &bits, 4);
  return pair_to_float(pair);
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
          else if constexpr (Rule::kCentred)
            packed[half][2 * i + r] = pack_pair<E>((s[0] * scale[half][r] + shift[half][r]) * v.x + v.z,
                                                   (s[1] * scale[half][r] + shift[half][r]) * v.y + v.w);
          else
            packed[half][2 * i + r] = pack_pair<E>(rule.template apply<E>(s[0], scale[half][r], v.x, v.z),
                                                   rule.template apply<E>(s[1], scale[half][r], v.y, v.w));
        }
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
      store_matrices((row ^ (j % 8 * 16)) + j / 8 * (Shape::kTileM * 128) + half * (64 * 128), packed[half][0],
                     packed[half][1], packed[half][2], packed[half][3]);
    if (j % 8 == 6) store(j / 8);
  }
}

// The same in place and not rounded, for results of more than one type.
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
        const float factor = scale[half][i / 2], gamma = i % 2 ? v.y : v.x, beta = i % 2 ? v.w : v.z;
        if constexpr (Rule::kCentred)
          s = (s * factor - mean[half][i / 2] * factor) * gamma + beta;
        else
          s = rule.template apply<E>(s, factor, gamma, beta);
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
