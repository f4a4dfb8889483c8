// mma_tile (gemm/ampere/mma_tile.cuh) of byte rows by a matrix in int8, which Hopper multiplies by mma.sync too: this
// file is compiled for all GPUs.
#include "gemm/ampere/mma_tile.cuh"
#include "gemm/ampere/other_endings.h"

namespace ftbert {
namespace {

template <class E, Gate kGate>
void run_type(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  const StoreArguments<Int8Scales, AnyActivation> arguments{{static_cast<const uint8_t*>(data.a), byte_row_bytes(p.k),
                                                             data.b_scale, int8_row_sums(data.b, p.n, p.k), data.bias},
                                                            {p.epilogue.activation},
                                                            data.c,
                                                            nullptr};
  MmaShapes::with(variant, [&](auto shape) {
    using Shape = decltype(shape);
    using Ending = Store<E, E, kGate, ByteRowBias<E, Shape::kEights>, AnyActivation, typename Shape::Staging>;
    launch_mma_tile<uint8_t, Shape, Ending>(context, "kernel int8_mma_tile", p, data, arguments);
  });
}

}  // namespace

void run_mma_int8(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  const bool gated = p.epilogue.gate == Gate::pairs;
  if (p.c == DType::fp16)
    gated ? run_type<__half, Gate::pairs>(context, variant, p, data)
          : run_type<__half, Gate::none>(context, variant, p, data);
  else
    gated ? run_type<__nv_bfloat16, Gate::pairs>(context, variant, p, data)
          : run_type<__nv_bfloat16, Gate::none>(context, variant, p, data);
}

}  // namespace ftbert
