// The Ending of a product behind a deferred norm (gemm/gpu/deferred_norm.h): its sums become those of the norm's rows,
// then activation and gate.
#pragma once
#include "device/launch.cuh"
#include "gemm/gpu/endings/moments.cuh"
#include "gemm/gpu/endings/store.cuh"

namespace ftbert {
namespace {

struct CorrectArguments {
  const float* add;    // [n]
  const float* slope;  // [n]
  PendingNorm norm;
  RowMoments cleared;
  double inverse;  // 1 / k
  void* c;
  AnyActivation activations;
};

inline CorrectArguments correct_arguments(const Product& p, const ProductData& data) {
  const MomentData& by = data.by_moments;
  return {.add = by.add,
          .slope = by.slope,
          .norm = by.pending,
          .cleared = by.moments,
          .inverse = 1.0 / static_cast<double>(p.k),
          .c = data.c,
          .activations = {p.epilogue.activation}};
}

template <class E, class Shape, Gate kGate>
struct Correct {
  using Arguments = CorrectArguments;
  using Staging = typename Shape::Staging;
  static constexpr int kVectors = 2;

  const Arguments& arguments;
  int64_t m;
  int n;
  int64_t row0 = 0;
  int column0 = 0;
  RowScales scales;

  __device__ Correct(const Arguments& arguments, int64_t m, int n) : arguments(arguments), m(m), n(n) {}
  __device__ const float* vector(int i) const { return i == 0 ? arguments.add : arguments.slope; }

  __device__ void look_ahead(int64_t row, int column) {
    row0 = row, column0 = column;
    const int lane = threadIdx.x % 32;
    wait_for_inputs();
    if (arguments.norm.gamma) scales.look(arguments.norm, row0 + Fragment::row(), m);
    if (column0 == 0 && lane < 16 && row0 + lane < m) {
      auto* const to = reinterpret_cast<longlong2*>(arguments.cleared.data + (row0 + lane) * kMomentWords);
      to[0] = to[1] = {0, 0};
    }
  }

  __device__ void finish(float (&sums)[Shape::kEights][4], const float* vectors, char* memory) {
    float2 scale[2] = {{1, 0}, {1, 0}};
    if (arguments.norm.gamma) scales.get(arguments.inverse, arguments.norm.eps, scale);
    Fragment::each_pair(sums, [&](int j, int r, float& x, float& y) {
      const float2 add = pair_of<0, Shape>(vectors, j), slope = pair_of<1, Shape>(vectors, j);
      x = x * scale[r].x + (slope.x * scale[r].y + add.x);
      y = y * scale[r].x + (slope.y * scale[r].y + add.y);
    });
    Staging::template stage<E>(memory, sums);
    arguments.activations.with([&](auto kind) {
      // Gates one pack at a time: more lanes share those of few columns.
      store_staged<Staging, E, E, decltype(kind)::value, kGate, 1>(memory, {arguments.c, m, n}, row0, column0);
    });
  }
};

template <class E, class Shape>
using Corrected = Correct<E, Shape, Gate::none>;
template <class E, class Shape>
using CorrectedGates = Correct<E, Shape, Gate::pairs>;

}  // namespace
}  // namespace ftbert
