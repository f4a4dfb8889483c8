// The list of our kernels, and the one whose guess is the shortest time, or cuBLASLt.
#include <algorithm>

#include "gemm/gpu/guessed_time.h"
#include "gemm/gpu/own.h"

namespace ftbert {
namespace {

double million_elements(const Product& p) { return 1e-6 * static_cast<double>(p.m) * static_cast<double>(p.n); }

// Of cuBLASLt's kernels with few rows: 2.9 us with k of 384 to 6.9 with 3072, with whatever n (H200, 8 to 128 rows; no
// kernel started early). Clocks divide it.
double cublas_start(const Gpu& gpu, const Product& p) {
  return kMeasuredHz / clock_of(gpu) * (2.4 + 1.25e-3 * static_cast<double>(p.k));
}

// cuBLASLt's first proposal on GPUs before Hopper, where it multiplies by mma.sync too: no measurement. Four fifths of
// the tensor cores' rate; activations and gates, by kernels of their own, read and write the sums.
OwnGuess mma_cublas_guess(const Gpu& gpu, const Product& p, double saved_us) {
  const double multiplied = 1e6 * million_elements(p) * static_cast<double>(p.k) / (0.8 * mma_rate(gpu));
  const bool activated = p.epilogue.gate != Gate::none || p.epilogue.activation != Activation::none;
  const double after = activated ? 2.0 + 4e6 * million_elements(p) / memory_rate(gpu) : 0;
  const double read = is_reading(gpu, p) ? reading_microseconds(gpu, p) : 0;
  return {.us = saved_us + cublas_start(gpu, p) + std::max(multiplied, read) + after, .beyond = p.m <= few_rows_of(p)};
}

// The same on Hopper, for 16-bit operands. Its wave count is unknown: add 3 %. add_bias_gate writes half of what
// add_bias_act does, and so takes three quarters of its time. By large weights another line fits, from a few hundred
// rows on, and add_bias_gate finds fewer of the sums in L2; add_bias_act behind them was not measured. Of 65 to 128
// rows that line lacks the time of reading the weight, but so do those of wgmma_tile, and the order is right.
OwnGuess cublas_guess(const Gpu& gpu, const Product& p, double saved_us) {
  if (gpu.device_capability < 90) return mma_cublas_guess(gpu, p, saved_us);
  const bool large = has_large_weight(p);
  double million = 2.63e-3 * static_cast<double>(p.k) + 0.38;  // of a million elements
  if (p.epilogue.gate == Gate::pairs)
    million += large ? 1.03 : 0.64;
  else if (p.epilogue.activation != Activation::none)
    million += 0.85;
  const double product = million * million_elements(p);
  const double us = large ? 2.0 + product : gpu.warpgroups ? 1.03 * (4.0 + product) : cublas_start(gpu, p) + product;
  return {.us = saved_us + (is_reading(gpu, p) ? std::max(us, 4.0 + reading_microseconds(gpu, p)) : us),
          .beyond = p.m <= few_rows_of(p)};
}

// add_bias_input_layernorm: start, and for a million elements, each read twice and stored once.
constexpr double kFollowingNorm[] = {0.79, 1.28};

// The same behind a product of E4M3, where the norm is stored in 16 bits and in E4M3: measured in models, 16384x768 and
// 1907x768 (H100).
constexpr double kFollowingScaledNorm[] = {4.0, 2.8};

// The same of up to 1024 rows, between two kernels that start early. Without their two norms layers of BERT-base
// took 2.3 to 4.2 us less up to 704 rows, where the guess says that their products take up to 5.2 more; of 896 rows 4
// us more, where it says 11. BERT-large: 2.1 to 4.8 us less up to 512 rows, 5 more of 576 (H200).
constexpr double kNormOfFewRows = 2.75;

// Launch and first loads of a kernel that does not start before the one ahead has ended. In code for GPUs before Hopper
// none does. No measurement.
constexpr double kStartLate = 2.0;

// Time of a kernel that only moves rows over its time on an H100: the ratio of the memories' rates, no measurement.
double moving_time(const Gpu& gpu) {
  constexpr double kMeasuredBytes = 3.35e6;  // a microsecond
  return gpu.device_capability == 90 ? 1 : kMeasuredBytes / memory_rate(gpu);
}

double norm_microseconds(const Gpu& gpu, const Product& p) {
  const double million = moving_time(gpu) * million_elements(p);
  if (p.a == DType::e4m3) return kFollowingScaledNorm[0] + kFollowingScaledNorm[1] * million;
  // That the sum is stored too counts as much as another read: no measurement.
  const double stored = p.epilogue.after == After::norm_beside ? 4.0 / 3 : 1;
  return kFollowingNorm[0] + stored * kFollowingNorm[1] * million;
}

// `rotary` reads and stores the heads of queries and keys: 512 x 8192 took 9.1 us (H100).
double rotary_microseconds(const Gpu& gpu, const Product& p) {
  const int64_t bytes = 2 * p.m * p.epilogue.heads.columns * static_cast<int64_t>(sizeof(half_t));
  return 2.0 + moving_time(gpu) * static_cast<double>(bytes) / 2.6e6;
}

// The fastest of ours that takes less than `best`, which becomes its guess.
OwnChoice fastest(const Gpu& gpu, const Product& product, OwnGuess& best) {
  OwnChoice found;
  for (const OwnKernel* kernel : own_kernels()) {
    if (!kernel->reads.has_all(parts_of(product))) continue;
    const OwnGuess guess = kernel->guess(gpu, product);
    if (guess.variant >= 0 && guess.beats(best)) best = guess, found = {kernel, guess.variant};
  }
  return found;
}

}  // namespace

std::span<const OwnKernel* const> own_kernels() {
  static constexpr const OwnKernel* kKernels[] = {&wgmma_persistent, &wgmma_tile,     &wgmma_layernorm, &wgmma_prenorm,
                                                  &few_rows,         &few_rows_lanes, &wgmma_q8_0,      &mma_tile};
  return kKernels;
}

std::string kernels_on(const Gpu& gpu) {
  struct Types {
    DType a;
    const Format* b;
  };
  const auto has_product = [&gpu](const OwnKernel& own) {
    for (const Types& types : {Types{DType::fp16, &formats::fp16},
                               {DType::e4m3, &formats::e4m3},
                               {DType::uint8, &formats::int8},
                               {DType::fp16, &formats::q8_0}})
      for (const int64_t m : {1, 128, 16384})
        for (const After after : {After::nothing, After::norm, After::norm_beside}) {
          const bool normed = after != After::nothing;
          const Epilogue epilogue{.bias = normed, .residual = normed, .after = after};
          const Product product{
              .m = m, .n = 768, .k = 768, .a = types.a, .b = types.b, .c = DType::fp16, .epilogue = epilogue};
          for (size_t i = 0; i < own.variants.size(); ++i)
            if (own.can(gpu, static_cast<int>(i), product)) return true;
        }
    return false;
  };
  std::string names;
  for (const OwnKernel* own : own_kernels())
    if (has_product(*own)) names += (names.empty() ? "" : ", ") + std::string(own->name);
  return names;
}

bool has_kernel(const Gpu& gpu, const Product& product) {
  for (const OwnKernel* own : own_kernels())
    for (size_t i = 0; i < own->variants.size(); ++i)
      if (own->can(gpu, static_cast<int>(i), product)) return true;
  return false;
}

std::string in_the_way(const Gpu& gpu, const Product& product) {
  const auto without = [&](auto change) {
    Product rest = product;
    change(rest);
    return rest != product && has_kernel(gpu, rest);
  };
  const auto member = [&]() -> std::string {
    if (without([](Product& p) { p.epilogue.norm = NormKind::layer; })) return "this norm";
    if (without([](Product& p) { p.before = Before::nothing; })) return "the norm of its rows";
    if (without([](Product& p) { p.epilogue.heads = {}; })) return "what becomes of its heads";
    if (without([](Product& p) { p.epilogue.after = After::nothing; })) return "what it leaves of the residual sum";
    if (without([](Product& p) { p = p.alone(); })) return "the residual, or one of several norms";
    if (without([](Product& p) { p.epilogue.gate = Gate::none; })) return "its gate";
    if (without([](Product& p) { p.epilogue.activation = Activation::none; })) return "its activation";
    if (without([](Product& p) { p.c = DType::fp16; }) || without([](Product& p) { p.c = DType::bf16; }))
      return "the type of its result";
    return "its types or sizes";
  };
  const auto text = [](auto value) { return std::string(to_string(value)); };
  const Epilogue& e = product.epilogue;
  return "m=" + std::to_string(product.m) + " n=" + std::to_string(product.n) + " k=" + std::to_string(product.k) +
         " batch=" + std::to_string(product.batch) + ", " + text(product.a) + " by " + std::string(product.b->name) +
         " in " + text(product.c) + ", activation " + text(e.activation) + (e.gate != Gate::none ? " and a gate" : "") +
         (has_kernel(gpu, product) ? "" : ": no kernel of ours does " + member() + " beside the rest");
}

OwnChoice find_own(std::string_view kernel, std::string_view variant) {
  for (const OwnKernel* own : own_kernels())
    for (size_t i = 0; own->name == kernel && i < own->variants.size(); ++i)
      if (own->variants[i].name() == variant) return {own, static_cast<int>(i)};
  return {};
}

OwnChoice with_ending(const Gpu& gpu, const OwnChoice& own, const Product& product) {
  if (!own || own.kernel->can(gpu, own.variant, product)) return own;
  if (!product.epilogue.heads) return {};
  // The smallest tile of which there are no more than multiprocessors, up to twice as large as that of `own`: the
  // longer steps of k then take less than `rotary` does.
  const auto area = [](const Tile& tile) { return int64_t{tile.rows} * tile.columns; };
  const auto& variants = own.kernel->variants;
  OwnChoice found;
  for (int v = 0; v < static_cast<int>(variants.size()); ++v) {
    const Tile& tile = variants[v].tile;
    if (own.kernel->can(gpu, v, product) &&
        over(product.m, tile.rows) * over(product.n, tile.columns) <= gpu.sm_count &&
        area(tile) <= 2 * area(variants[own.variant].tile) &&
        (!found || area(tile) < area(variants[found.variant].tile)))
      found = {own.kernel, v};
  }
  return found;
}

bool deferring_pays(const Gpu& gpu, std::span<const Product> layers) {
  const auto is_e4m3 = [](const Product& product) { return product.a == DType::e4m3; };
  if (gpu.warpgroups && std::none_of(layers.begin(), layers.end(), is_e4m3)) return true;
  double deferred = 0, alone = 0;
  for (const Product& product : layers) {
    OwnGuess whole{.beyond = true}, part{.beyond = true};
    if (!is_e4m3(product)) part = cublas_guess(gpu, product.alone(), 0);
    fastest(gpu, product, whole);
    fastest(gpu, product.alone(), part);
    deferred += whole.us, alone += part.us;
    if (product.epilogue.residual)
      alone += gpu.warpgroups ? kNormOfFewRows : kStartLate + norm_microseconds(gpu, product);
  }
  return deferred < alone;
}

OwnChoice guess_product(const Gpu& gpu, const Product& product) {
  const bool ours_alone = is_e4m3_linear(product) || is_int8_linear(product) || is_q8_0_linear(product);
  if (!ours_alone && !is_16_bit_linear(product)) return {};  // times are known of these alone
  const bool normed = product.epilogue.normed();
  const bool heads = static_cast<bool>(product.epilogue.heads);
  if (!is_plain(product) && !normed && !heads) {  // no other kernel does the same
    OwnGuess best{.beyond = true};
    return fastest(gpu, product, best);
  }
  // `linear` has nothing but ours for operands of 8 bits.
  OwnGuess best =
      ours_alone ? OwnGuess{.beyond = true} : cublas_guess(gpu, product, heads ? rotary_microseconds(gpu, product) : 0);
  const OwnChoice found = fastest(gpu, product.alone(), best);
  if (!normed) return found;
  best.us += norm_microseconds(gpu, product);
  return fastest(gpu, product, best);
}

}  // namespace ftbert
