// Products of wgmma_persistent (wgmma_persistent.cuh): which there are, how long they take, and their launches.
#include <algorithm>
#include <type_traits>

#include "gemm/gpu/endings/turn.cuh"
#include "gemm/gpu/guessed_time.h"
#include "gemm/gpu/turned_product.h"
#include "gemm/hopper/wgmma_persistent.cuh"

namespace ftbert {
namespace {

// A: of A's and B's elements; E: of the bias; C: of the result.
template <class A, class E, class C>
void run_persistent(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  const auto launch = [&]<Gate kGate, Activation kActivation>() {
    using Activations = OneActivation<kActivation>;
    launch_persistent<A, Store<E, C, kGate, NoBias, Activations, SwizzledRows>>(
        context, "kernel wgmma_persistent", variant, p, data, {{}, Activations(), data.c, data.c_scale});
  };
  if (p.epilogue.gate == Gate::pairs)
    return with_activation(p.epilogue.activation,
                           [&](auto kind) { launch.template operator()<Gate::pairs, decltype(kind)::value>(); });
  if (p.epilogue.activation == Activation::none) return launch.template operator()<Gate::none, Activation::none>();
  launch.template operator()<Gate::none, Activation::gelu_erf>();
}

// With heads turned in registers (turned_product.h).
template <class A, class T>
void launch_turned(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data) {
  using E = native_t<T>;
  const HeadRules<T> rules = rules_over<T>(data.rules);
  const TurnArguments<E> arguments{data.bias, data.c, head_turn(data.heads, rules)};
  with_norm_rule(rules.q_norm, [&]<class Rule>() {
    if constexpr (!std::is_same_v<Rule, LayerRule>) {
      const auto run = [&]<int kHead>() {
        launch_persistent<A, TurnInRegisters<E, kHead, Rule>>(context, "kernel turned_persistent", variant, product,
                                                              data, arguments);
      };
      data.heads.size == 64 ? run.template operator()<64>() : run.template operator()<128>();
    }
  });
}

template <class T>
void run_turned(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  p.a == DType::e4m3 ? launch_turned<e4m3_t, T>(context, variant, p, data)
                     : launch_turned<native_t<T>, T>(context, variant, p, data);
}

void run(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  if (p.epilogue.heads)
    return p.c == DType::fp16 ? run_turned<half_t>(context, variant, p, data)
                              : run_turned<bfloat16_t>(context, variant, p, data);
  if (p.a == DType::e4m3)
    return with_scaled_types(p, data,
                             [&]<class E, class C>() { run_persistent<e4m3_t, E, C>(context, variant, p, data); });
  p.a == DType::fp16 ? run_persistent<__half, __half, __half>(context, variant, p, data)
                     : run_persistent<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16>(context, variant, p, data);
}

// Heads are turned in registers.
bool has_ending(const Product& p) {
  const Epilogue& e = p.epilogue;
  return !e.heads || (e.heads.whole && holds_heads(e.heads, kTileN) && e.activation == Activation::none &&
                      e.gate == Gate::none && p.c != DType::e4m3);
}

bool supports(const Gpu& gpu, int variant, const Product& p) {
  const Epilogue& e = p.epilogue;
  const bool e4m3 = is_e4m3_linear(p);
  return gpu.warpgroups && (e4m3 || is_16_bit_linear(p)) && has_ending(p) &&
         over(p.n, kTileN) % PersistentShapes::kBlocks[variant] == 0 && is_gelu_or_gate(e) &&
         p.n % (e4m3 || e.gate != Gate::none ? 16 : 8) == 0 && p.k % (e4m3 ? 16 : 8) == 0 &&
         std::max({p.m, p.n, p.k}) < (int64_t{1} << 30);
}

// From so many columns on pairs take 0.88 to 1.00 of the time of single blocks, with fewer 0.90 to 1.07 (H100, k from
// 384 to 3072, 2064 to 16384 rows).
constexpr int64_t kPairsFrom = 4096;

// In waves; half of one counts. In E4M3 the lines are 2 % off in the mean and 5 % at most, of 18 products with 2064 to
// 16384 rows, k from 768 to 3072, with erf GELU, a gate or neither and results of 16 bits (H100); results in E4M3 take
// 0.95 of that. Few rows of E4M3, which share less of the memory, have lines of their own: 6 % off in the mean, fitted
// with those of wgmma_tile.
OwnGuess guess(const Gpu& gpu, const Product& p) {
  static constexpr TimeLine kLines[] = {{0, 2.80, 0.350, 0.323, 1.07, 0}, {1, 2.80, 0.325, 0.323, 1.07, 0}};
  static constexpr TimeLine kE4m3Lines[] = {{0, 1.41, 0.355, 1.24, 0.64, 0}, {1, 1.41, 0.338, 1.24, 0.64, 0}};
  static constexpr TimeLine kFewE4m3Lines[] = {{0, 1.878, 0.369, 0, 0.978, 0.59}, {1, 2.182, 0.401, 0, 0.949, 0.47}};
  constexpr double kLargeE4m3 = 1.45;  // with reads_large_e4m3
  // By a large weight pairs are slower in one wave, and up to 128 rows.
  const bool large = reads_large_e4m3(p);
  const bool in_pairs = !large || (p.m > kTileM && over(p.m, kTileM) * over(p.n, kTileN) > gpu.sm_count);
  const int variant = p.n >= kPairsFrom && in_pairs && supports(gpu, 1, p) ? 1 : 0,
            blocks = PersistentShapes::kBlocks[variant];
  if (!supports(gpu, variant, p)) return {};
  const PersistentWork work = work_of(p, {}, gpu.sm_count, blocks);
  const double waves =
      static_cast<double>(over(work.whole, gpu.sm_count / blocks)) + (work.items > work.whole ? 0.5 : 0.0);
  const auto& lines = p.a != DType::e4m3 ? kLines : p.m > kFewRows ? kE4m3Lines : kFewE4m3Lines;
  const double us = microseconds(lines[variant], waves, p) * (large ? kLargeE4m3 : 1);
  return {variant, is_reading(gpu, p) ? std::max(us, 2.8 + reading_microseconds(gpu, p)) : us,
          p.a != DType::e4m3 && p.m <= few_rows_of(p)};
}

constexpr Parts kReads{Part::bias, Part::activation, Part::gate, Part::heads};

}  // namespace

const OwnKernel wgmma_persistent{"wgmma_persistent", PersistentShapes::kVariants, kReads, supports, guess, run};

}  // namespace ftbert
