// Products of wgmma_tile (wgmma_tile.cuh) alone: which there are, how long they take, and their launches.
#include "gemm/gpu/deferred_norm.h"
#include "gemm/gpu/guessed_time.h"
#include "gemm/gpu/turned_product.h"
#include "gemm/hopper/other_endings.h"
#include "gemm/hopper/wgmma_tile.cuh"

namespace ftbert {
namespace {

template <class E, class Shape, Gate kGate>
using Plain = Store<E, E, kGate, Bias<E, Shape::kEights>, AnyActivation, typename Shape::Staging>;
template <class E, class Shape>
using Ungated = Plain<E, Shape, Gate::none>;
template <class E, class Shape>
using Gated = Plain<E, Shape, Gate::pairs>;

// A and B in E4M3: scales and bias come behind the last step, when the parts of k have met. E: of the bias; C: of the
// result, E or E4M3.
template <class E, class C, Gate kGate, class Activations, class Shape>
using Scaled = Store<E, C, kGate, ScaledBias<E, Shape::kEights>, Activations, typename Shape::Staging>;

template <class E, class C>
void run_scaled(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  ScaledTileShapes::with(variant, [&](auto shape) {
    using Shape = decltype(shape);
    const auto launch = [&]<Gate kGate>(auto activations) {
      const StoreArguments<ScalesAndBias, decltype(activations)> arguments{
          {scales_of(p, data), data.bias}, activations, data.c, data.c_scale};
      launch_tile<e4m3_t, Shape, Scaled<E, C, kGate, decltype(activations), Shape>>(context, "kernel wgmma_tile", p,
                                                                                    data, arguments);
    };
    const Activation activation = p.epilogue.activation;
    p.epilogue.gate == Gate::pairs ? launch.template operator()<Gate::pairs>(AnyActivation{activation})
                                   : launch.template operator()<Gate::none>(GeluOrNone{activation});
  });
}

void run(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  const bool scaled = p.a == DType::e4m3;
  if (p.epilogue.residual) return (scaled ? run_e4m3_ahead_of_norm : run_ahead_of_norm)(context, variant, p, data);
  if (p.before == Before::norm_by_moments)
    return (scaled ? run_e4m3_behind_norm : run_behind_norm)(context, variant, p, data);
  if (p.epilogue.heads) return run_turned_tile(context, variant, p, data);
  if (scaled)
    return with_scaled_types(p, data, [&]<class E, class C>() { run_scaled<E, C>(context, variant, p, data); });
  const StoreArguments<const void*, AnyActivation> arguments{data.bias, {p.epilogue.activation}, data.c, nullptr};
  if (p.epilogue.gate == Gate::pairs) return run_tile<Gated>(context, "kernel wgmma_tile", variant, p, data, arguments);
  run_tile<Ungated>(context, "kernel wgmma_tile", variant, p, data, arguments);
}

// One ending of those that are not is_plain. Of E4M3 operands no sum is kept.
bool has_ending(int variant, const Product& p) {
  const Epilogue& e = p.epilogue;
  const bool scaled = p.a == DType::e4m3, plain_sums = e.activation == Activation::none && e.gate == Gate::none;
  if (e.residual)
    return (scaled ? e.after == After::moments && p.c != DType::e4m3 : e.leaves_moments()) &&
           p.before == Before::nothing && !e.heads && plain_sums;
  if (!e.heads) return true;
  return !scaled && p.before == Before::nothing && plain_sums && TileShapes::kParts[variant] == 1 &&
         holds_heads(e.heads, TileShapes::kVariants[variant].tile.columns);
}

bool supports(const Gpu& gpu, int variant, const Product& p) {
  if (!gpu.warpgroups || !(is_plain(p) || has_ending(variant, p))) return false;
  if (variant >= NarrowTileShapes::kCount && p.before != Before::norm_by_moments) return false;
  const int64_t most_rows = 32 * TileShapes::kVariants[variant].tile.rows;  // from there on wgmma_persistent is faster
  const bool e4m3 = is_e4m3_linear(p);
  if (e4m3 && variant >= ScaledTileShapes::kCount) return false;
  return (e4m3 ? is_gelu_or_gate(p.epilogue) : is_16_bit_linear(p)) && p.m <= most_rows &&
         p.n % (e4m3 || p.epilogue.gate != Gate::none ? 16 : 8) == 0 && p.k % (e4m3 ? 16 : 8) == 0 &&
         std::max(p.n, p.k) < (1 << 24) && over(p.k * bytes_of(p.a), kStepBytes) >= TileShapes::kParts[variant];
}

int64_t blocks_of(int variant, const Product& p) {
  const Tile tile = TileShapes::kVariants[variant].tile;
  return over(p.m, tile.rows) * over(p.n, tile.columns) * tile.split;
}

// Up to few_rows_of, else -1: the narrowest tile with which every block has a multiprocessor of its own. Up to 128 rows
// some multiprocessors must stay free, on which the next kernel begins. Where k is long, tiles that divide k come
// first. On an H200 layers of BERT-base, BERT-large and MiniLM-L6 in fp16 took 0.96 to 1.07 times as long as with
// products that were chosen in layers for each size, 1.013 times in the mean of 57 sizes. By a large weight, which
// comes from memory, more of k on the way counts for more: of 40 rows 4096x4096 and 4096x10240 (n x k) took 0.84 of the
// narrowest tile's time with k in two parts; in blocks of which a multiprocessor has two 12288x4096 took 0.91 of it,
// and gated 20480x4096 and 22016x4096 0.93 and 0.90 (H200).
int few_rows_variant(const Gpu& gpu, const Product& p) {
  const auto fits = [&](int variant, double share) {
    return supports(gpu, variant, p) && static_cast<double>(blocks_of(variant, p)) <= share * gpu.sm_count;
  };
  if (p.m > few_rows_of(p)) return -1;
  const int64_t k_bytes = p.k * bytes_of(p.a);
  const bool short_k = k_bytes <= 8 * kStepBytes, long_k = k_bytes >= 32 * kStepBytes;
  if (p.m <= 256 && (p.k > p.n || (long_k && p.k == p.n))) {
    const int variant = k_bytes < 16 * kStepBytes ? -1
                        : !long_k                 ? TileShapes::variant_of<InTwos<64, 4>>()
                        : p.m <= 128              ? TileShapes::variant_of<Single<96, 4>>()
                                                  : TileShapes::variant_of<Single<48, 2>>();
    if (variant >= 0 && fits(variant, 1)) return variant;
  }
  if (has_large_weight(p) && p.m > 8 && p.m <= 64 && long_k) {  // up to eight few_rows is faster
    const int divided = TileShapes::variant_of<Single<96, 2>>();
    if (p.k >= p.n && fits(divided, 1)) return divided;
    if (over(p.n, 48) > gpu.sm_count)
      for (const int variant : {TileShapes::variant_of<InTwos<48, 1>>(), TileShapes::variant_of<InTwos<64, 1>>(),
                                TileShapes::variant_of<InTwos<96, 1>>()})
        if (fits(variant, 2)) return variant;
  }
  const bool in_twos = short_k && p.m <= 256;
  const int narrow[] = {
      in_twos ? TileShapes::variant_of<InTwos<32, 1>>() : TileShapes::variant_of<KShared<32>>(),
      in_twos ? TileShapes::variant_of<InTwos<48, 1>>() : TileShapes::variant_of<KShared<48>>(),
      in_twos ? TileShapes::variant_of<InTwos<64, 1>>() : TileShapes::variant_of<KShared<64>>(),
      in_twos ? TileShapes::variant_of<InTwos<96, 1>>() : TileShapes::variant_of<KShared<96>>(),
      TileShapes::variant_of<Tall<64>>(),
      TileShapes::variant_of<Tall<96>>(),
      TileShapes::variant_of<Tall<128>>(),
      TileShapes::variant_of<Tall<192>>(),
      TileShapes::variant_of<Tall<256>>(),
  };
  // Of more than 512 rows 128x64 was faster than 64x96 where k is 4096, and 128x256 was measured.
  const bool many = p.m > 512, with_96 = p.m <= 192 || (long_k && !(many && k_bytes >= 64 * kStepBytes));
  const auto is_left_out = [&](int variant) {
    return (variant == TileShapes::variant_of<KShared<96>>() && !with_96) ||
           (variant == TileShapes::variant_of<Tall<256>>() && !many);
  };
  const double share = long_k || p.k > p.n ? 1 : short_k ? (in_twos ? 0.75 : 0.9) : p.m <= 128 ? 0.6 : 1;
  for (const double limit : {share, 1.0})
    for (const int variant : narrow)
      if (!is_left_out(variant) && fits(variant, limit)) return variant;
  return -1;
}

// In any number of waves, of two blocks a multiprocessor where they come in twos. The lines were fitted to 11 shapes of
// BERT-base, BERT-large, MiniLM-L6 and a gated layer with 32 to 2048 rows (H100). What they choose, wgmma_persistent
// included, takes 1.03 times as long as the fastest of all variants in the geometric mean, and at most 1.34 times.
OwnGuess guess_e4m3(const Gpu& gpu, const Product& p) {
  static constexpr struct {
    TimeLine line;
    int blocks;
    double large;  // a factor, with reads_large_e4m3
  } kLines[] = {
      {{TileShapes::variant_of<InTwos<32, 1>>(), 0, 0.146, 0.741, 0.266, 3.004}, 2, 1.05},
      {{TileShapes::variant_of<InTwos<96, 1>>(), 0, 0.238, 2.226, 0.796, 1.13}, 2, 1.55},
      {{TileShapes::variant_of<InTwos<32, 4>>(), 0.647, 0.071, 0.259, 0.393, 9.495}, 2, 1.05},
      {{TileShapes::variant_of<KShared<32>>(), 0.149, 0.106, 0.828, 0.38, 2.523}, 1, 1.05},
      {{TileShapes::variant_of<KShared<48>>(), 0, 0.133, 1.01, 0.522, 2.096}, 1, 1.05},
  };
  OwnGuess best;
  for (const auto& [line, blocks, large] : kLines) {
    if (!supports(gpu, line.variant, p)) continue;
    // Of clusters not as many are there at once: 240 of 264 blocks were in one wave, 256 took twice as long.
    const int64_t there = gpu.sm_count * blocks * (TileShapes::kVariants[line.variant].tile.split > 1 ? 15 : 16) / 16;
    const int64_t waves = over(blocks_of(line.variant, p), there);
    const double us = microseconds(line, static_cast<double>(waves), p) * (reads_large_e4m3(p) ? large : 1);
    if (us < best.us) best = {line.variant, us};
  }
  return best;
}

// Of 16 bits in one wave only. Of few rows the rule's variant, by the line of 64x64 pair where it has none itself; a
// part of a divided k takes its share of the steps.
OwnGuess guess(const Gpu& gpu, const Product& p) {
  static constexpr TimeLine kLines[] = {
      {TileShapes::variant_of<KShared<64>>(), 2.25, 0.115, 0, 0.43, 0},
      {TileShapes::variant_of<KShared<96>>(), 2.53, 0.136, 0, 0.65, 0},
      {TileShapes::variant_of<Tall<64>>(), 2.37, 0.175, 0, 0.43, 0},
      {TileShapes::variant_of<Tall<96>>(), 2.65, 0.241, 0, 0.65, 0},
      {TileShapes::variant_of<Tall<128>>(), 2.79, 0.303, 0, 0.87, 0},
  };
  if (p.a == DType::e4m3) return guess_e4m3(gpu, p);
  if (const int few = few_rows_variant(gpu, p); few >= 0) {
    const TimeLine* line =
        std::find_if(std::begin(kLines), std::end(kLines), [&](const TimeLine& one) { return one.variant == few; });
    Product part = p;
    part.k /= TileShapes::kVariants[few].tile.split;
    return {few, microseconds(line == std::end(kLines) ? kLines[0] : *line, 1, part)};
  }
  OwnGuess best;
  for (const TimeLine& line : kLines) {
    if (!supports(gpu, line.variant, p) || blocks_of(line.variant, p) > gpu.sm_count) continue;
    if (const double us = microseconds(line, 1, p); us < best.us) best = {line.variant, us};
  }
  return best;
}

constexpr Parts kReads{Part::bias,    Part::activation,     Part::gate,       Part::heads,          Part::residual,
                       Part::moments, Part::moments_beside, Part::other_norm, Part::norm_by_moments};

}  // namespace

const OwnKernel wgmma_tile{"wgmma_tile", TileShapes::kVariants, kReads, supports, guess, run};

}  // namespace ftbert
