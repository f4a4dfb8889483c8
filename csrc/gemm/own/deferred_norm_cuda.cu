// The endings of deferred_norm.h on the kernel of wgmma_tile.cuh.
#include "gemm/own/deferred_moments.cuh"
#include "gemm/own/deferred_norm.h"
#include "gemm/own/wgmma_tile.cuh"

namespace ftbert {
namespace {

// Of the two columns that this thread has in accumulator j.
template <int kVector, class Shape>
__device__ float2 pair_of(const float* vectors, int j) {
  return *reinterpret_cast<const float2*>(vectors + kVector * Shape::kTileN + j * 8 + threadIdx.x % 4 * 2);
}

struct CorrectedArguments {
  const float *add, *slope;
  PendingNorm norm;
  DeferredMoments cleared;
  double inverse;  // 1 / k
  void* c;
  Activation activation;
};

template <class E, class Shape>
struct Corrected {
  using Arguments = CorrectedArguments;
  static constexpr int kVectors = 2;

  const Arguments& arguments;
  const TileWork& work;
  int64_t row0 = 0;
  int column0 = 0;
  RowScales scales;

  __device__ Corrected(const Arguments& arguments, const TileWork& work) : arguments(arguments), work(work) {}
  __device__ const float* vector(int i) const { return i == 0 ? arguments.add : arguments.slope; }

  __device__ void look_ahead(int64_t row, int column) {
    row0 = row, column0 = column;
    const int lane = threadIdx.x % 32;
    wait_for_inputs();
    if (arguments.norm.gamma) scales.look(arguments.norm, row0 + lane / 4, work.m);
    if (column0 == 0 && lane < 16 && row0 + lane < work.m) {
      long long* const to = arguments.cleared.data + (row0 + lane) * kMomentWords;
      *reinterpret_cast<longlong2*>(to) = {0, 0};
      to[2] = 0;
    }
  }

  __device__ void finish(float (&sums)[Shape::kEights][4], const float* vectors, char* area) {
    float2 scale[2] = {{1, 0}, {1, 0}};
    if (arguments.norm.gamma) scales.get(arguments.inverse, arguments.norm.eps, scale);
#pragma unroll
    for (int j = 0; j < Shape::kEights; ++j) {
      const float2 add = pair_of<0, Shape>(vectors, j), slope = pair_of<1, Shape>(vectors, j);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sums[j][2 * r] = sums[j][2 * r] * scale[r].x + (slope.x * scale[r].y + add.x);
        sums[j][2 * r + 1] = sums[j][2 * r + 1] * scale[r].x + (slope.y * scale[r].y + add.y);
      }
    }
    stage_rows<E, Shape>(area, [&](int j, int c) { return sums[j][c]; });
    with_activation(arguments.activation, [&](auto kind) {
      store_rows<E, decltype(kind)::value, Shape>(area, work, arguments.c, row0, column0);
    });
  }
};

struct SummingArguments {
  const float *add, *gamma, *gamma_out;  // gamma: of the LayerNorm that is pending, or any vector
  PendingNorm norm;
  DeferredMoments moments;
  double inverse;  // 1 / n
  const void* residual;
  void* c;
};

template <class E, class Shape>
struct Summing {
  using Arguments = SummingArguments;
  static constexpr int kVectors = 3;

  const Arguments& arguments;
  const TileWork& work;
  int64_t row0 = 0;
  int column0 = 0;
  RowScales scales;
  uint32_t residual[Shape::kEights][2];

  __device__ Summing(const Arguments& arguments, const TileWork& work) : arguments(arguments), work(work) {}
  __device__ const float* vector(int i) const {
    return i == 0 ? arguments.add : i == 1 ? arguments.gamma : arguments.gamma_out;
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
    if (arguments.norm.gamma) scales.look(arguments.norm, first_row(), work.m);
  }

  __device__ void finish(float (&sums)[Shape::kEights][4], const float* vectors, char* area) {
    float2 scale[2] = {{1, 0}, {1, 0}};
    if (arguments.norm.gamma) scales.get(arguments.inverse, arguments.norm.eps, scale);
#pragma unroll
    for (int j = 0; j < Shape::kEights; ++j) {
      const float2 add = pair_of<0, Shape>(vectors, j), gamma = pair_of<1, Shape>(vectors, j);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Packed<E, 2> pair{residual[j][r]};
        float x[2];
        pair.to_floats(x);
        sums[j][2 * r] += x[0] * scale[r].x + (gamma.x * scale[r].y + add.x);
        sums[j][2 * r + 1] += x[1] * scale[r].x + (gamma.y * scale[r].y + add.y);
      }
    }
    const int count = max(0, min(Shape::kEights * 8, work.n - column0));
    float shift[2] = {}, total[2] = {}, squares[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (count > 0) shift[r] = __shfl_sync(~0u, sums[0][2 * r], 0, 4);
#pragma unroll
    for (int j = 0; j < Shape::kEights; ++j) {
      const float2 gamma_out = pair_of<2, Shape>(vectors, j);
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
    for (int r = 0; r < 2; ++r) total[r] = reduce<4>(total[r], Sum()), squares[r] = reduce<4>(squares[r], Sum());
    add_moments(arguments.moments, first_row(), work.m, count, shift, total, squares);
    store_rows<E, Activation::none, Shape>(area, work, arguments.c, row0, column0);
  }
};

// A warp for each of the weight's rows.
template <class E>
__global__ void correction_vectors_kernel(const E* weight, const E* bias, const float* gamma, const E* beta, int n,
                                          int k, float* add, float* slope) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (row >= n) return;
  float with_gamma = 0, with_beta = 0;
  for (int i = lane; gamma && i < k; i += 32) {
    const float w = to_float(weight[static_cast<int64_t>(row) * k + i]);
    with_gamma += w * gamma[i];
    with_beta += w * to_float(beta[i]);
  }
  with_gamma = reduce<32>(with_gamma, Sum());
  with_beta = reduce<32>(with_beta, Sum());
  if (lane == 0) add[row] = to_float(bias[row]) + with_beta, slope[row] = with_gamma;
}

// One warp.
template <class E>
__global__ void sum_vectors_kernel(const E* bias, const E* beta, const E* gamma, int n, float* add, float* scaled,
                                   float* unscale) {
  const int lane = threadIdx.x;
  const auto value = [&](int i) { return to_float(bias[i]) + (beta ? to_float(beta[i]) : 0.0f); };
  float sum = 0, largest = 0;
  const auto gamma_of = [&](int i) { return gamma ? to_float(gamma[i]) : 1.0f; };
  for (int i = lane; i < n; i += 32) {
    sum += value(i);
    largest = fmaxf(largest, fabsf(gamma_of(i)));
  }
  const float mean = reduce<32>(sum, Sum()) / static_cast<float>(n);
  largest = reduce<32>(largest, Max());
  int exponent = 0;
  if (gamma && largest > 0 && isfinite(largest)) frexpf(largest, &exponent);
  for (int i = lane; i < n; i += 32) {
    add[i] = value(i) - mean;
    scaled[i] = ldexpf(gamma_of(i), -exponent);
  }
  if (lane == 0) *unscale = ldexpf(1, exponent);
}

template <class Run>
void with_element(DType dtype, const Run& run) {
  dtype == DType::fp16 ? run(__half()) : run(__nv_bfloat16());
}

}  // namespace

void run_corrected(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data,
                   const float* add, const float* slope, const PendingNorm& norm, const DeferredMoments& cleared) {
  check_own(context, {&wgmma_tile, variant}, product, data);
  const double inverse = 1.0 / static_cast<double>(product.k);
  const CorrectedArguments arguments{add, slope, norm, cleared, inverse, data.c, product.epilogue.activation};
  run_tile<Corrected>(context, "kernel corrected_product", variant, product, data, arguments);
}

void run_summing(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data,
                 const float* add, const void* residual, const PendingNorm& norm, const float* gamma,
                 const DeferredMoments& moments) {
  check_own(context, {&wgmma_tile, variant}, product, data);
  const double inverse = 1.0 / static_cast<double>(product.n);
  const float* const pending = norm.gamma ? norm.gamma : add;
  const SummingArguments arguments{add, pending, gamma, norm, moments, inverse, residual, data.c};
  run_tile<Summing>(context, "kernel summing_product", variant, product, data, arguments);
}

void make_sum_vectors(const Context<Cuda>& context, DType dtype, const void* bias, const void* beta, const void* gamma,
                      int64_t n, float* add, float* scaled, float* unscale) {
  with_element(dtype, [&](auto element) {
    const auto of = [](const void* pointer) { return static_cast<const decltype(element)*>(pointer); };
    launch_kernel(context, "kernel make_sum_vectors", sum_vectors_kernel<decltype(element)>, 1, 32, of(bias), of(beta),
                  of(gamma), n, add, scaled, unscale);
  });
}

void make_correction_vectors(const Context<Cuda>& context, DType dtype, const void* weight, const void* bias,
                             const float* gamma, const void* beta, int64_t n, int64_t k, float* add, float* slope) {
  with_element(dtype, [&](auto element) {
    const auto of = [](const void* pointer) { return static_cast<const decltype(element)*>(pointer); };
    launch_kernel(context, "kernel make_correction_vectors", correction_vectors_kernel<decltype(element)>, (n + 7) / 8,
                  256, of(weight), of(bias), gamma, of(beta), n, k, add, slope);
  });
}

}  // namespace ftbert
