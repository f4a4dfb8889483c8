// Products of any number of rows by a weight in Q8_0: which there are, and their launches.
#include <algorithm>

#include "core/check.h"
#include "gemm/gpu/guessed_time.h"
#include "gemm/gpu/own.h"
#include "gemm/hopper/rows_map.h"
#include "gemm/hopper/wgmma_q8_0.cuh"

namespace ftbert {
namespace {

template <int kTokens, int kGroups, int kBlocks>
struct Variant : Q8Shape<kTokens, kGroups, kBlocks> {
  // As tables call them: rows of c are those of a.
  static constexpr int kTileM = kTokens, kTileN = 64 * kGroups, kSplit = 1;
  static constexpr std::string_view kKind = {};
};
using Shapes =
    ShapeList<Variant<16, 1, 2>, Variant<32, 1, 2>, Variant<64, 1, 2>, Variant<128, 2, 1>, Variant<256, 2, 1>>;

// Results are stored 16 bytes at a time, with a gate too.
bool supports(const Gpu& gpu, int, const Product& p) {
  return gpu.warpgroups && is_q8_0_linear(p) && p.n % 16 == 0 && p.k % kQ8Step == 0 && p.n * p.k <= INT32_MAX;
}

template <class E, class Shape>
void launch(const Context<Cuda>& context, const Product& p, const ProductData& data) {
  const int64_t tiles = over(p.m, Shape::kTokens) * over(p.n, Shape::kRows), steps = p.k / kQ8Step;
  const Q8Work<E> work{.bias = static_cast<const E*>(data.bias),
                       .c = static_cast<E*>(data.c),
                       .activation = p.epilogue.activation,
                       .gate = p.epilogue.gate,
                       .m = static_cast<int>(p.m),
                       .n = static_cast<int>(p.n),
                       .k = static_cast<int>(p.k)};
  launch_overlapped(context, "kernel wgmma_q8_0", wgmma_q8_0_kernel<E, Shape>,
                    static_cast<unsigned>(std::min<int64_t>(tiles, context.sm_count * Shape::kBlocks)), Shape::kThreads,
                    size_t{Shape::kBytes}, 1, rows_map(p, data, Shape::kTokens),
                    pieces_map(data.b, p.n / 8, steps, kQ8Numbers, Shape::kRows / 8),
                    pieces_map(q8_0_scales(data.b, p.n, p.k), p.n / 8, steps, kQ8Scales, Shape::kRows / 8), work);
}

void run(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  Shapes::with(variant, [&](auto shape) {
    using Shape = decltype(shape);
    p.a == DType::fp16 ? launch<__half, Shape>(context, p, data) : launch<__nv_bfloat16, Shape>(context, p, data);
  });
}

// The lines are of more rows than few_rows has.
OwnGuess guess(const Gpu& gpu, const Product& p) {
  // Microseconds of a step of k with one block on a multiprocessor, with two together (0: there is no room for two),
  // and of the work around a tile's steps. Fitted to 32 products of Llama-2-7B's matrices on an H100: what it chooses
  // is at most 4 % behind the fastest.
  static constexpr struct {
    int variant;
    double alone, together, tile;
  } kTimes[] = {
      {0, 0.245, 0.265, 1.5}, {1, 0.245, 0.265, 1.5}, {2, 0.255, 0.36, 1.5}, {3, 0.42, 0, 3}, {4, 0.6, 0, 3.5}};
  OwnGuess best;
  for (const auto& time : kTimes) {
    if (!supports(gpu, time.variant, p)) continue;
    const Tile tile = Shapes::kVariants[time.variant].tile;
    const int64_t tiles = over(p.m, tile.rows) * over(p.n, tile.columns);
    const auto steps = static_cast<double>(p.k / kQ8Step);
    const int64_t each = over(tiles, gpu.sm_count), pairs = time.together > 0 ? each / 2 : 0;  // of a multiprocessor
    const double us = static_cast<double>(pairs) * (time.together * steps + time.tile) +
                      static_cast<double>(each - 2 * pairs) * (time.alone * steps + time.tile);
    if (us < best.us) best = {time.variant, us, p.m <= kMostFewRows};
  }
  return best;
}

}  // namespace

const OwnKernel wgmma_q8_0{"wgmma_q8_0", Shapes::kVariants, kPlainParts, supports, guess, run};

}  // namespace ftbert
