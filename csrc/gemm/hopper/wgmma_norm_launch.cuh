// How wgmma_norm.cuh's kernel is launched, what it can do, and how long it is expected to take.
#pragma once
#include <algorithm>
#include <span>

#include "core/check.h"
#include "gemm/gpu/guessed_time.h"
#include "gemm/hopper/rows_map.h"
#include "gemm/hopper/wgmma_norm.cuh"

namespace ftbert {
namespace {

template <class E, class Shape, class Rule, class Maps>
void launch_norm(const Context<Cuda>& context, const Product& p, const ProductData& data) {
  const int columns = static_cast<int>(p.n / Shape::kTileN), row_tiles = static_cast<int>(over(p.m, Shape::kTileM));
  FTBERT_CHECK(columns <= context.sm_count, "a product with a norm: a row of ", columns,
               " tiles needs as many multiprocessors");
  const ExchangedMoments& moments = data.moments;
  const uint32_t turn = static_cast<uint32_t>(moments.turn) % kMarks, mark = turn + 1;
  if (turn == 0)
    FTBERT_CUDA_CHECK(cudaMemsetAsync(moments.data, 0, moments.count * sizeof(*moments.data),
                                      static_cast<cudaStream_t>(context.stream)));
  WorkOf<Shape> work;
  static_cast<Work&>(work) = Work{.k_steps = static_cast<int>(over(p.k * bytes_of(p.a), kStepBytes)),
                                  .columns = columns,
                                  .row_tiles = row_tiles,
                                  .eps = data.norm.eps,
                                  .row_inverse = 1.0f / static_cast<float>(p.n),
                                  .bias = data.bias,
                                  .gamma = data.norm.gamma,
                                  .beta = data.norm.beta,
                                  .moments = moments.data,
                                  .mark = (mark >> 7) << 31 | (mark & 0x7f),
                                  .offset = data.norm.offset};
  if constexpr (Shape::kScaled) {
    work.scales = scales_of(p, data);
    work.copy = data.copy_scale ? static_cast<uint8_t*>(data.copy) : nullptr, work.copy_scale = data.copy_scale;
    work.rows = p.m;
  }
  Maps maps;
  maps.a = rows_map(p, data, Shape::kTileM);
  maps.b = tensor_map(data.b, p.b->numbers, p.n, p.k, Shape::kTileN);
  maps.in = tensor_map(data.c, p.c, rows_in_tiles(p.m), p.n, Shape::kTileM);
  maps.out = tensor_map(data.c, p.c, p.m, p.n, 16);
  if constexpr (Maps::kKeepSum)
    maps.copy = data.copy_scale ? maps.out : tensor_map(data.copy, p.c, p.m, p.n, 16);  // of E4M3 none is used
  const int blocks = std::min(row_tiles, context.sm_count / columns) * columns;
  launch_overlapped(context, "kernel wgmma_norm", wgmma_norm_kernel<E, Shape, Rule, Maps>, blocks, kThreads,
                    Shape::kBytes, Presence(1, true), maps, work);
}

// OwnKernel::run: launch.operator()<E, Shape>() of the product's element type and the variant's shape.
template <class Shapes, class Launch>
void run_norm(int variant, const Product& p, const ProductData& data, const Launch& launch) {
  FTBERT_CHECK(data.moments.count >= exchanged_moment_count(p.m), "a product with a norm of ", p.m, " rows needs ",
               exchanged_moment_count(p.m), " moments, got ", data.moments.count);
  FTBERT_CHECK(data.norm.kind == p.epilogue.norm && data.norm.gamma, "a product does not contain this norm");
  Shapes::with(variant, [&](auto shape) {
    using Shape = decltype(shape);
    p.c == DType::fp16 ? launch.template operator()<__half, Shape>()
                       : launch.template operator()<__nv_bfloat16, Shape>();
  });
}

// run_norm where the sum stays, with the kernel of the norm's rule.
template <class Shapes>
void run_sum_and_norm(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  run_norm<Shapes>(variant, p, data, [&]<class E, class Shape>() {
    if (data.norm.kind == NormKind::layer)
      launch_norm<E, Shape, LayerRule, SumMaps>(context, p, data);
    else if (data.norm.rounding == NormRounding::once)
      launch_norm<E, Shape, RmsRule<NormRounding::once>, SumMaps>(context, p, data);
    else
      launch_norm<E, Shape, RmsRule<NormRounding::before_gamma>, SumMaps>(context, p, data);
  });
}

template <class Shapes>
bool supports_norm(const Gpu& gpu, int variant, const Product& p, After after) {
  const Epilogue& e = p.epilogue;
  const bool normed = e.norm == NormKind::layer || e.norm == NormKind::rms;
  const int64_t columns = Shapes::kVariants[variant].tile.columns;
  const bool e4m3 = is_e4m3_linear(p) && p.c != DType::e4m3;
  return gpu.warpgroups && (e4m3 || is_16_bit_linear(p)) && e.after == after && normed && p.n % columns == 0 &&
         p.k % (e4m3 ? 16 : 8) == 0 && p.n / columns <= kMostNormTiles && std::max(p.m, p.k) < (int64_t{1} << 30);
}

// Of wgmma_layernorm's variants; the first ones are those of its siblings. The last two were fitted to 6 weights by 16
// numbers of rows from 1056 to 33024 (H200, 4 % off in the mean). With them the variant guessed takes 1.003 times as
// long as the fastest of these 96 products, without them 1.019 times.
constexpr TimeLine kNormLines[] = {
    {0, 0.52, 0.466, 3.51, 0, 0.554},   // 128x192 together
    {1, 3.01, 0.288, 0.13, 0, 0.927},   // 64x192
    {2, 3.37, 0.326, 0.28, 0, 0.899},   // 128x128
    {3, -0.32, 0.632, 3.62, 0, 0.866},  // 128x256 together
    {4, 3.66, 0.461, 1.10, 0, 0.625},   // 128x192 single
    {5, 3.01, 0.332, 0.674, 0, 0.881},  // 128x128 single
    {6, 2.62, 0.269, 0.284, 0, 0.656},  // 64x128
};

// more: what each element takes beyond the lines.
template <class Shapes>
OwnGuess guess_norm(const Gpu& gpu, const Product& p, After after, double more = 1) {
  OwnGuess best;
  for (TimeLine line : std::span(kNormLines).first(Shapes::kCount)) {
    if (p.m <= kFewRows || !supports_norm<Shapes>(gpu, line.variant, p, after)) continue;
    line.area *= more;
    const Tile tile = Shapes::kVariants[line.variant].tile;
    const int64_t at_once = gpu.sm_count / (p.n / tile.columns);  // rows of tiles
    if (at_once == 0) continue;
    const double us = microseconds(line, static_cast<double>(over(over(p.m, tile.rows), at_once)), p);
    if (us < best.us) best = {line.variant, us};
  }
  return best;
}

// With A and B in E4M3, by the lines of wgmma_layernorm in 16 bits: a byte more is stored for each element, and no
// kernel moves more than kMemoryBytes a microsecond. No measurement.
OwnGuess guess_scaled_norm(const Gpu& gpu, const Product& p, After after) {
  constexpr double kMemoryBytes = 2.6e6;
  OwnGuess best = guess_norm<ScaledShapes>(gpu, p, after);
  const auto elements = static_cast<double>(p.m * p.n), operands = static_cast<double>((p.m + p.n) * p.k);
  best.us = std::max(best.us + elements / kMemoryBytes, (5 * elements + operands) / kMemoryBytes);
  return best;
}

}  // namespace
}  // namespace ftbert
