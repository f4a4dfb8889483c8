// wgmma_tile with the ending of turned_product.h, and which variants turn heads.
#include <climits>

#include "core/check.h"
#include "gemm/gpu/endings/turn.cuh"
#include "gemm/gpu/guessed_time.h"
#include "gemm/gpu/turned_product.h"
#include "gemm/hopper/wgmma_tile.cuh"

namespace ftbert {
namespace {

// Whether each warp has whole heads.
template <class Shape, int kHead>
inline constexpr bool kTurns = Shape::kParts == 1 && Shape::kTileN % kHead == 0;

template <int kHead, class T>
void run_tile_of(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data,
                 const TurnArguments<native_t<T>>& arguments) {
  TileShapes::with(variant, [&](auto shape) {
    using Shape = decltype(shape);
    using E = native_t<T>;
    if constexpr (kTurns<Shape, kHead>)
      launch_tile<E, Shape, TurnThroughMemory<E, kHead, Shape::kEights>>(context, "kernel turned_tile", p, data,
                                                                         arguments);
  });
}

int64_t area(const Tile& tile) { return int64_t{tile.rows} * tile.columns; }

}  // namespace

template <class T>
bool turns(const OwnChoice& own, const Heads& heads, const HeadRules<T>& rules) {
  const int64_t size = heads.size, dims = rules.rotation.dims;
  const bool whole =
      own.kernel == &wgmma_persistent || (own.kernel == &wgmma_tile && TileShapes::kParts[own.variant] == 1);
  if (!whole || (size != 64 && size != 128) || own.kernel->variants[own.variant].tile.columns % size != 0) return false;
  if (own.kernel == &wgmma_persistent && !turns_in_registers(heads, rules)) return false;
  const bool turned = !rules.rotation || (dims % 8 == 0 && vectorizable(4, 0, rules.rotation.table) &&
                                          rules.rotation.positions * dims <= INT_MAX);
  const Norm<T>&q = rules.q_norm, &k = rules.k_norm;
  return turned && vectorizable(4, 0, q.gamma, q.beta, k.gamma, k.beta);
}

template <class T>
OwnChoice turning(const Gpu& gpu, const OwnChoice& own, const Product& product, const Heads& heads,
                  const HeadRules<T>& rules) {
  const bool e4m3 = product.a == DType::e4m3;  // which wgmma_persistent alone turns
  if (!own || (turns(own, heads, rules) && !(e4m3 && own.kernel == &wgmma_tile))) return own;
  if (own.kernel != &wgmma_tile || e4m3) return {};
  // The smallest tile of which there are no more than multiprocessors, up to twice as large as that of the plan: the
  // longer steps of k then take less than `rotary` does.
  const auto tile_of = [](int variant) { return wgmma_tile.variants[variant].tile; };
  OwnChoice found;
  for (int v = 0; v < static_cast<int>(wgmma_tile.variants.size()); ++v) {
    const Tile tile = tile_of(v);
    if (turns({&wgmma_tile, v}, heads, rules) && wgmma_tile.supports(gpu, v, product) &&
        over(product.m, tile.rows) * over(product.n, tile.columns) <= gpu.sm_count &&
        area(tile) <= 2 * area(tile_of(own.variant)) && (!found || area(tile) < area(tile_of(found.variant))))
      found = {&wgmma_tile, v};
  }
  return found;
}

template <class T>
void run_turned(const Context<Cuda>& context, const OwnChoice& own, const Product& product, const ProductData& data,
                const Heads& heads, const HeadRules<T>& rules) {
  check_own(context, own, product, data);
  FTBERT_CHECK(turns(own, heads, rules) && product.n == heads.qkv_width() &&
                   product.epilogue == Epilogue{.bias = data.bias != nullptr},
               "the product ", own.kernel->name, " ", own.variant_name(), " cannot turn heads of ", heads.size,
               " in n=", product.n);
  FTBERT_CHECK(!rules.rotation || rules.positions, "rotary: there is a table, but no positions given");
  if (own.kernel == &wgmma_persistent) return run_turned_persistent(context, own.variant, product, data, heads, rules);
  FTBERT_CHECK(product.a != DType::e4m3, "the product ", own.kernel->name, " turns no heads of a product of e4m3");
  const TurnArguments<native_t<T>> arguments{data.bias, data.c, head_turn(heads, rules)};
  heads.size == 64 ? run_tile_of<64, T>(context, own.variant, product, data, arguments)
                   : run_tile_of<128, T>(context, own.variant, product, data, arguments);
}

#define FTBERT_INSTANTIATE(T)                                                                                        \
  template bool turns(const OwnChoice&, const Heads&, const HeadRules<T>&);                                          \
  template OwnChoice turning(const Gpu&, const OwnChoice&, const Product&, const Heads&, const HeadRules<T>&);       \
  template void run_turned(const Context<Cuda>&, const OwnChoice&, const Product&, const ProductData&, const Heads&, \
                           const HeadRules<T>&);
FTBERT_INSTANTIATE(half_t)
FTBERT_INSTANTIATE(bfloat16_t)

}  // namespace ftbert
