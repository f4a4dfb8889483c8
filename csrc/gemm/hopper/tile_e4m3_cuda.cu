// wgmma_tile with A and B in E4M3, whose 128 elements are a row of a stage where 64 of 16 bits are. Scales and bias
// come behind the last step, when the parts of k have met. C is of 16 bits, or E4M3 with a scale.
#include <type_traits>

#include "gemm/gpu/endings/e4m3_sums.cuh"
#include "gemm/hopper/wgmma_tile.cuh"

namespace ftbert {
namespace {

struct ScaledArguments : E4m3Scales {
  const void* bias;
  void* c;
  Activation activation;
};

// As store_rows and store_gated_rows, in E4M3: of two packs of sums 16 bytes, or 8 of one where a warp has an odd
// number; with a gate half of that.
template <class E, Activation kActivation, Gate kGate, class Shape>
__device__ void store_e4m3_rows(const char* shared, const TileWork& work, void* c, int64_t row0, int column0,
                                float inverse) {
  constexpr int kSums = Shape::kEights % 2 == 0 ? 16 : 8, kAcross = Shape::kEights * 8 / kSums;
  constexpr int kOfOne = kGate == Gate::pairs ? 2 : 1;  // sums
  __syncwarp();
#pragma unroll 2
  for (int i = threadIdx.x % 32; i < 16 * kAcross; i += 32) {
    const int row = i / kAcross, first = i % kAcross * kSums, column = column0 + first;  // of the sums
    float v[kSums];
    load_staged<E, Shape>(shared, row, first, v);
    const auto stored = pack_e4m3<E, kActivation, kGate>(v, inverse);
    if (row0 + row < work.m && column < work.n)
      stored.store(
          reinterpret_cast<uint32_t*>(static_cast<char*>(c) + (row0 + row) * (work.n / kOfOne) + column / kOfOne));
  }
}

// E: of the bias, and as the sums are rounded before the activation. C: as the result is stored, E or E4M3.
template <class E, class C, Gate kGate, class Shape>
struct Scaled {
  using Arguments = ScaledArguments;
  static constexpr int kVectors = 0;
  // Of so many columns that registers run short, the eight threads that have the same ones keep an eighth of the bias.
  static constexpr bool kSpread = Shape::kEights > 16;
  static constexpr int kBiases = kSpread ? Shape::kEights / 8 : Shape::kEights;
  static_assert(!kSpread || Shape::kEights % 8 == 0);

  const Arguments& arguments;
  const TileWork& work;
  int64_t row0 = 0;
  int column0 = 0;
  float inverse = 1;  // of C's scale
  float2 scale[Shape::kEights];
  Packed<E, 2> bias[kBiases];

  __device__ Scaled(const Arguments& arguments, const TileWork& work) : arguments(arguments), work(work) {}

  __device__ void look_ahead(int64_t row, int first_column) {
    row0 = row, column0 = first_column;
    if constexpr (std::is_same_v<C, e4m3_t>) inverse = 1 / *arguments.c_scale;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < Shape::kEights; ++j) {
      const int column = column0 + j * 8 + lane % 4 * 2;
      float s[2] = {};
      if (column < work.n) load_scales(arguments, column, s);
      scale[j] = {s[0], s[1]};
    }
#pragma unroll
    for (int i = 0; i < kBiases; ++i) {
      const int column = column0 + (kSpread ? i * 8 + lane / 4 : i) * 8 + lane % 4 * 2;
      bias[i] = arguments.bias && column < work.n ? Packed<E, 2>::load(static_cast<const E*>(arguments.bias) + column)
                                                  : Packed<E, 2>::zero();
    }
  }

  __device__ void finish(float (&sums)[Shape::kEights][4], const float*, char* area) const {
#pragma unroll
    for (int j = 0; j < Shape::kEights; ++j) {
      Packed<E, 2> pair = bias[kSpread ? j / 8 : j];
      if constexpr (kSpread) pair.bits = __shfl_sync(~0u, pair.bits, j % 8 * 4 + threadIdx.x % 4);
      float b[2];
      pair.to_floats(b);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sums[j][2 * r] = sums[j][2 * r] * scale[j].x + b[0];
        sums[j][2 * r + 1] = sums[j][2 * r + 1] * scale[j].y + b[1];
      }
    }
    stage_rows<E, Shape>(area, [&](int j, int c) { return sums[j][c]; });
    const auto store = [&](auto kind) {
      constexpr Activation kActivation = decltype(kind)::value;
      if constexpr (std::is_same_v<C, e4m3_t>)
        store_e4m3_rows<E, kActivation, kGate, Shape>(area, work, arguments.c, row0, column0, inverse);
      else if constexpr (kGate == Gate::pairs)
        store_gated_rows<E, kActivation, Shape>(area, work, arguments.c, row0, column0);
      else
        store_rows<E, kActivation, Shape>(area, work, arguments.c, row0, column0);
    };
    if constexpr (kGate == Gate::pairs)
      with_activation(arguments.activation, store);
    else if (arguments.activation == Activation::none)
      store(std::integral_constant<Activation, Activation::none>());
    else
      store(std::integral_constant<Activation, Activation::gelu_erf>());
  }
};

template <class E, class C>
void run_type(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  const ScaledArguments arguments{scales_of(p, data), data.bias, data.c, p.epilogue.activation};
  TileShapes::with(variant, [&](auto shape) {
    using Shape = decltype(shape);
    const auto launch = [&](auto gate) {
      launch_tile<e4m3_t, Shape, Scaled<E, C, decltype(gate)::value, Shape>>(context, "kernel wgmma_tile", p, data,
                                                                             arguments);
    };
    p.epilogue.gate == Gate::pairs ? launch(std::integral_constant<Gate, Gate::pairs>())
                                   : launch(std::integral_constant<Gate, Gate::none>());
  });
}

template <class E>
void run_bias_type(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  p.c == DType::e4m3 ? run_type<E, e4m3_t>(context, variant, p, data) : run_type<E, E>(context, variant, p, data);
}

}  // namespace

void run_tile_e4m3(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  data.bias_type(p) == DType::fp16 ? run_bias_type<__half>(context, variant, p, data)
                                   : run_bias_type<__nv_bfloat16>(context, variant, p, data);
}

}  // namespace ftbert
