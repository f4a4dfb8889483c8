// The product ahead of a deferred norm (deferred_norm.h), on the kernel of wgmma_tile.cuh.
#include "gemm/gpu/deferred_norm.h"
#include "gemm/gpu/endings/deferred_moments.cuh"
#include "gemm/hopper/wgmma_tile.cuh"

namespace ftbert {
namespace {

struct SummingArguments {
  const float *add, *gamma, *gamma_out;  // gamma: of the LayerNorm that is pending, or any vector
  PendingNorm norm;
  DeferredMoments moments;
  double inverse;  // 1 / n
  const void* residual;
  void* c;
  void* kept;    // where the sum itself goes
  bool centred;  // the norm that follows takes a mean off: without it moments are the squares alone
};

// kKeep: nothing is pending on the residual, which becomes the sum.
template <class E, class Shape, bool kKeep>
struct Sums {
  using Arguments = SummingArguments;
  static constexpr int kVectors = kKeep ? 2 : 3;

  const Arguments& arguments;
  const TileWork& work;
  int64_t row0 = 0;
  int column0 = 0;
  RowScales scales;
  uint32_t residual[Shape::kEights][2];

  __device__ Sums(const Arguments& arguments, const TileWork& work) : arguments(arguments), work(work) {}
  __device__ const float* vector(int i) const {
    return i == 0 ? arguments.add : i == 1 && !kKeep ? arguments.gamma : arguments.gamma_out;
  }
  __device__ int64_t first_row() const { return row0 + static_cast<int>(threadIdx.x) % 32 / 4; }

  __device__ void look_ahead(int64_t row, int column) {
    row0 = row, column0 = column;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const E* const from = static_cast<const E*>(arguments.residual) + min(first_row() + 8 * r, work.m - 1) * work.n +
                            column0 + threadIdx.x % 4 * 2;
#pragma unroll
      for (int j = 0; j < Shape::kEights; ++j)
        residual[j][r] = column0 + j * 8 < work.n ? __ldcg(reinterpret_cast<const uint32_t*>(from + j * 8)) : 0;
    }
    if (!kKeep && arguments.norm.gamma) scales.look(arguments.norm, first_row(), work.m);
  }

  __device__ void finish(float (&sums)[Shape::kEights][4], const float* vectors, char* area) {
    float2 scale[2] = {{1, 0}, {1, 0}};
    if (!kKeep && arguments.norm.gamma) scales.get(arguments.inverse, arguments.norm.eps, scale);
#pragma unroll
    for (int j = 0; j < Shape::kEights; ++j) {
      const float2 add = pair_of<0, Shape>(vectors, j), gamma = kKeep ? float2{} : pair_of<1, Shape>(vectors, j);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Packed<E, 2> pair{residual[j][r]};
        float x[2];
        pair.to_floats(x);
        sums[j][2 * r] += x[0] * scale[r].x + (gamma.x * scale[r].y + add.x);
        sums[j][2 * r + 1] += x[1] * scale[r].x + (gamma.y * scale[r].y + add.y);
      }
    }
    if constexpr (kKeep) {
      stage_rows<E, Shape>(area, [&](int j, int c) { return sums[j][c]; });
      store_rows<E, Activation::none, Shape>(area, work, arguments.kept, row0, column0);
      __syncwarp();
    }
    const bool centred = !kKeep || arguments.centred;
    const int count = max(0, min(Shape::kEights * 8, work.n - column0));
    float shift[2] = {}, total[2] = {}, squares[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (centred && count > 0) shift[r] = __shfl_sync(~0u, sums[0][2 * r], 0, 4);
#pragma unroll
    for (int j = 0; j < Shape::kEights; ++j) {
      const float2 gamma_out = pair_of<kVectors - 1, Shape>(vectors, j);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float &first = sums[j][2 * r], &second = sums[j][2 * r + 1];
        if (j * 8 < count) {
          const float d0 = first - shift[r], d1 = second - shift[r];
          total[r] += d0 + d1;
          squares[r] += d0 * d0 + d1 * d1;
        }
        first *= gamma_out.x, second *= gamma_out.y;
      }
    }
    stage_rows<E, Shape>(area, [&](int j, int c) { return sums[j][c]; });
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      total[r] = reduce<4>(total[r], Sum()), squares[r] = reduce<4>(squares[r], Sum());
      if (!centred) total[r] = 0;
    }
    add_moments(arguments.moments, first_row(), work.m, count, shift, total, squares);
    store_rows<E, Activation::none, Shape>(area, work, arguments.c, row0, column0);
  }
};

template <class E, class Shape>
using Summing = Sums<E, Shape, false>;
template <class E, class Shape>
using Keeping = Sums<E, Shape, true>;

}  // namespace

void run_summing(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data,
                 const float* add, const void* residual, const PendingNorm& norm, const float* gamma,
                 const DeferredMoments& moments) {
  check_own(context, {&wgmma_tile, variant}, product, data);
  const double inverse = 1.0 / static_cast<double>(product.n);
  const float* const pending = norm.gamma ? norm.gamma : add;
  const SummingArguments arguments{add, pending, gamma, norm, moments, inverse, residual, data.c, nullptr, true};
  run_tile<Summing>(context, "kernel summing_product", variant, product, data, arguments);
}

void run_keeping(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data,
                 const float* add, void* x, const float* gamma, bool centred, const DeferredMoments& moments) {
  check_own(context, {&wgmma_tile, variant}, product, data);
  const SummingArguments arguments{add, nullptr, gamma, {}, moments, 0, x, data.c, x, centred};
  run_tile<Keeping>(context, "kernel keeping_product", variant, product, data, arguments);
}

}  // namespace ftbert
