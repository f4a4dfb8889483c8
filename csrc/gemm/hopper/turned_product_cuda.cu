// wgmma_tile with the ending of turned_product.h.
#include "gemm/gpu/endings/turn.cuh"
#include "gemm/gpu/turned_product.h"
#include "gemm/hopper/other_endings.h"
#include "gemm/hopper/wgmma_tile.cuh"

namespace ftbert {
namespace {

// Whether each warp has whole heads.
template <class Shape, int kHead>
inline constexpr bool kWholeHeads = Shape::kParts == 1 && Shape::kTileN % kHead == 0;

template <int kHead, class T>
void run_tile_of(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data,
                 const TurnArguments<native_t<T>>& arguments) {
  NarrowTileShapes::with(variant, [&](auto shape) {
    using Shape = decltype(shape);
    using E = native_t<T>;
    if constexpr (kWholeHeads<Shape, kHead>)
      launch_tile<E, Shape, TurnThroughMemory<E, kHead, Shape::kEights>>(context, "kernel turned_tile", p, data,
                                                                         arguments);
  });
}

template <class T>
void run_type(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  const TurnArguments<native_t<T>> arguments{data.bias, data.c, head_turn(data.heads, rules_over<T>(data.rules))};
  data.heads.size == 64 ? run_tile_of<64, T>(context, variant, p, data, arguments)
                        : run_tile_of<128, T>(context, variant, p, data, arguments);
}

}  // namespace

void run_turned_tile(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  p.c == DType::fp16 ? run_type<half_t>(context, variant, p, data) : run_type<bfloat16_t>(context, variant, p, data);
}

}  // namespace ftbert
