// The product behind a deferred norm (deferred_norm.h), on the kernel of wgmma_tile.cuh.
#include "gemm/gpu/deferred_norm.h"
#include "gemm/gpu/endings/deferred_moments.cuh"
#include "gemm/hopper/wgmma_tile.cuh"

namespace ftbert {
namespace {

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

  // Sums become those of the norm's rows, rounded, in the warp's own memory.
  __device__ void correct(float (&sums)[Shape::kEights][4], const float* vectors, char* area) {
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
  }

  __device__ void finish(float (&sums)[Shape::kEights][4], const float* vectors, char* area) {
    correct(sums, vectors, area);
    with_activation(arguments.activation, [&](auto kind) {
      store_rows<E, decltype(kind)::value, Shape>(area, work, arguments.c, row0, column0);
    });
  }
};

// Half as many columns as store_rows stores.
template <class E, Activation kActivation, class Shape>
__device__ void store_gates(const char* shared, const TileWork& work, void* c, int64_t row0, int column0) {
  constexpr int kEights = Shape::kEights;
  __syncwarp();
#pragma unroll 2
  for (int i = threadIdx.x % 32; i < 16 * kEights; i += 32) {
    const int row = i / kEights, column = column0 + i % kEights * 8;  // of the sums
    float v[8];
    Packed<E, 8>::load(reinterpret_cast<const E*>(shared + row * Shape::kRowBytes + i % kEights * 16)).to_floats(v);
    if (row0 + row < work.m && column < work.n)
      gate_pairs<kActivation, E, 4>(v).store(static_cast<E*>(c) + (row0 + row) * (work.n / 2) + column / 2);
  }
}

template <class E, class Shape>
struct CorrectedGates : Corrected<E, Shape> {
  __device__ CorrectedGates(const CorrectedArguments& arguments, const TileWork& work)
      : Corrected<E, Shape>(arguments, work) {}

  __device__ void finish(float (&sums)[Shape::kEights][4], const float* vectors, char* area) {
    this->correct(sums, vectors, area);
    with_activation(this->arguments.activation, [&](auto kind) {
      store_gates<E, decltype(kind)::value, Shape>(area, this->work, this->arguments.c, this->row0, this->column0);
    });
  }
};

}  // namespace

void run_corrected(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data,
                   const float* add, const float* slope, const PendingNorm& norm, const DeferredMoments& cleared) {
  check_own(context, {&wgmma_tile, variant}, product, data);
  const double inverse = 1.0 / static_cast<double>(product.k);
  const CorrectedArguments arguments{add, slope, norm, cleared, inverse, data.c, product.epilogue.activation};
  if (product.epilogue.gate == Gate::pairs)
    return run_tile<CorrectedGates>(context, "kernel corrected_product", variant, product, data, arguments);
  run_tile<Corrected>(context, "kernel corrected_product", variant, product, data, arguments);
}

}  // namespace ftbert
