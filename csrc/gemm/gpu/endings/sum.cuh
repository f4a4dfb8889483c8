// The Ending of a product ahead of a deferred norm (gemm/gpu/deferred_norm.h): the residual added, what the norm's
// gamma makes of the sum stored, and the moments of the sum's rows added to the other blocks'.
#pragma once
#include "gemm/gpu/endings/moments.cuh"
#include "gemm/gpu/endings/store.cuh"

namespace ftbert {
namespace {

struct SumArguments {
  const float* add;              // [n]
  const float* gamma = nullptr;  // of the LayerNorm that is pending, or any vector
  const float* gamma_out;        // of the norm that follows
  const float* scale = nullptr;  // [n], of operands in E4M3
  PendingNorm norm = {};
  RowMoments moments;
  double inverse = 0;  // 1 / n
  const void* residual;
  void* c;
  void* kept = nullptr;               // where the sum itself goes
  uint8_t* copy = nullptr;            // of c in E4M3, of operands in E4M3, or nullptr
  const float* copy_scale = nullptr;  // one, of the copy
  bool centred = true;  // the norm that follows takes a mean off: without it moments are the squares alone
};

inline SumArguments sum_arguments(const Product& p, const ProductData& data) {
  const MomentData& by = data.by_moments;
  SumArguments arguments{.add = by.add,
                         .gamma_out = by.gamma,
                         .scale = by.scale,
                         .moments = by.moments,
                         .residual = by.residual,
                         .c = data.c,
                         .copy = static_cast<uint8_t*>(data.copy),
                         .copy_scale = data.copy_scale};
  if (p.epilogue.after == After::moments_beside) {
    arguments.kept = const_cast<void*>(by.residual);
    arguments.centred = p.epilogue.norm == NormKind::layer;
  } else {
    arguments.gamma = by.pending.gamma ? by.pending.gamma : by.add;
    arguments.norm = by.pending;
    arguments.inverse = 1.0 / static_cast<double>(p.n);
  }
  return arguments;
}

// kKeep: nothing is pending on the residual, which becomes the sum. kScaled: the operands are E4M3.
template <class E, class Shape, bool kKeep, bool kScaled = false>
struct ResidualSum {
  using Arguments = SumArguments;
  using Staging = typename Shape::Staging;
  static constexpr int kGammaOut = kKeep ? 1 : 2, kScale = kGammaOut + 1, kVectors = kGammaOut + 1 + kScaled;

  const Arguments& arguments;
  int64_t m;
  int n;
  int64_t row0 = 0;
  int column0 = 0;
  RowScales scales;
  uint32_t residual[Shape::kEights][2];

  __device__ ResidualSum(const Arguments& arguments, int64_t m, int n) : arguments(arguments), m(m), n(n) {}
  __device__ const float* vector(int i) const {
    return i == 0           ? arguments.add
           : i == kScale    ? arguments.scale
           : i == kGammaOut ? arguments.gamma_out
                            : arguments.gamma;
  }
  __device__ int64_t first_row() const { return row0 + Fragment::row(); }

  __device__ void look_ahead(int64_t row, int column) {
    row0 = row, column0 = column;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const E* const from = static_cast<const E*>(arguments.residual) + min(first_row() + 8 * r, m - 1) * n + column0 +
                            Fragment::column();
#pragma unroll
      for (int j = 0; j < Shape::kEights; ++j)
        residual[j][r] = column0 + j * 8 < n ? __ldcg(reinterpret_cast<const uint32_t*>(from + j * 8)) : 0;
    }
    if (!kKeep && arguments.norm.gamma) scales.look(arguments.norm, first_row(), m);
  }

  __device__ void finish(float (&sums)[Shape::kEights][4], const float* vectors, char* memory) {
    float2 scale[2] = {{1, 0}, {1, 0}};
    if (!kKeep && arguments.norm.gamma) scales.get(arguments.inverse, arguments.norm.eps, scale);
    Fragment::each_pair(sums, [&](int j, int r, float& x, float& y) {
      const float2 add = pair_of<0, Shape>(vectors, j), gamma = kKeep ? float2{} : pair_of<1, Shape>(vectors, j);
      float of_residual[2];
      Packed<E, 2>{residual[j][r]}.to_floats(of_residual);
      if constexpr (kScaled) {
        const float2 by = pair_of<kScale, Shape>(vectors, j);
        x *= by.x, y *= by.y;
      }
      x += of_residual[0] * scale[r].x + (gamma.x * scale[r].y + add.x);
      y += of_residual[1] * scale[r].x + (gamma.y * scale[r].y + add.y);
    });
    if constexpr (kKeep) {
      Staging::template stage<E>(memory, sums);
      store(memory, arguments.kept);
      __syncwarp();
    }
    const bool centred = !kKeep || arguments.centred;
    const int count = max(0, min(Shape::kEights * 8, n - column0));
    float shift[2] = {}, total[2] = {}, squares[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (centred && count > 0) shift[r] = __shfl_sync(~0u, sums[0][2 * r], 0, 4);
    Fragment::each_pair(sums, [&](int j, int r, float& x, float& y) {
      if (j * 8 < count) {
        const float of_x = x - shift[r], of_y = y - shift[r];
        total[r] += of_x + of_y;
        squares[r] += of_x * of_x + of_y * of_y;
      }
      const float2 gamma_out = pair_of<kGammaOut, Shape>(vectors, j);
      x *= gamma_out.x, y *= gamma_out.y;
    });
    Staging::template stage<E>(memory, sums);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      total[r] = reduce<4>(total[r], Sum()), squares[r] = reduce<4>(squares[r], Sum());
      if (!centred) total[r] = 0;
    }
    add_moments(arguments.moments, first_row(), m, count, shift, total, squares);
    store(memory, arguments.c);
    if constexpr (kScaled)
      if (arguments.copy != nullptr)
        store_staged<Staging, E, e4m3_t, Activation::none, Gate::none>(
            memory, {arguments.copy, m, n, 1 / *arguments.copy_scale}, row0, column0);
  }

 private:
  __device__ void store(const char* memory, void* to) const {
    store_staged<Staging, E, E, Activation::none, Gate::none>(memory, {to, m, n}, row0, column0);
  }
};

template <class E, class Shape>
using Summing = ResidualSum<E, Shape, false>;
template <class E, class Shape>
using Keeping = ResidualSum<E, Shape, true>;
template <class E, class Shape>
using ScaledSumming = ResidualSum<E, Shape, false, true>;

}  // namespace
}  // namespace ftbert
