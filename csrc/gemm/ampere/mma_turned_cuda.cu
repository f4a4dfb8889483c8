// mma_tile with the ending of turned_product.h.
#include "gemm/ampere/mma_tile.cuh"
#include "gemm/ampere/other_endings.h"
#include "gemm/gpu/endings/turn.cuh"
#include "gemm/gpu/turned_product.h"

namespace ftbert {
namespace {

template <class T>
void run_type(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  using E = native_t<T>;
  const TurnArguments<E> arguments{data.bias, data.c, head_turn(data.heads, rules_over<T>(data.rules))};
  MmaShapes::with(variant, [&](auto shape) {
    using Shape = decltype(shape);
    if constexpr (kTurnsHeads<Shape>)
      launch_mma_tile<E, Shape, TurnThroughMemory<E, kTurnedHead, Shape::kEights>>(context, "kernel turned_mma_tile", p,
                                                                                   data, arguments);
  });
}

}  // namespace

void run_mma_turned(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  p.c == DType::fp16 ? run_type<half_t>(context, variant, p, data) : run_type<bfloat16_t>(context, variant, p, data);
}

}  // namespace ftbert
