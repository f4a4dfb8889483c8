// Products of mma_tile (mma_tile.cuh): which there are, how long they take, and their launches.
#include <algorithm>
#include <iterator>

#include "gemm/ampere/mma_tile.cuh"
#include "gemm/ampere/other_endings.h"
#include "gemm/gpu/guessed_time.h"
#include "gemm/gpu/turned_product.h"

namespace ftbert {
namespace {

template <class E, class Shape, Gate kGate>
using Plain = Store<E, E, kGate, Bias<E, Shape::kEights, Packed<E, 2>>, AnyActivation, typename Shape::Staging>;
template <class E, class Shape>
using Ungated = Plain<E, Shape, Gate::none>;
template <class E, class Shape>
using Gated = Plain<E, Shape, Gate::pairs>;

void run(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  if (p.a == DType::e4m3) return run_mma_e4m3(context, variant, p, data);
  if (p.a == DType::uint8) return run_mma_int8(context, variant, p, data);
  if (p.epilogue.residual) return run_mma_ahead_of_norm(context, variant, p, data);
  if (p.before == Before::norm_by_moments) return run_mma_behind_norm(context, variant, p, data);
  if (p.epilogue.heads) return run_mma_turned(context, variant, p, data);
  const StoreArguments<const void*, AnyActivation> arguments{data.bias, {p.epilogue.activation}, data.c, nullptr};
  if (p.epilogue.gate == Gate::pairs)
    return run_mma_tile<Gated>(context, "kernel mma_tile", variant, p, data, arguments);
  run_mma_tile<Ungated>(context, "kernel mma_tile", variant, p, data, arguments);
}

// Of a variant: the shared memory of a block, the bytes of k of a step, and whether it turns heads.
struct Facts {
  int bytes, step_bytes;
  bool turns_heads;
};
Facts facts_of(int variant) {
  Facts facts{};
  MmaShapes::with(variant, [&](auto shape) {
    using Shape = decltype(shape);
    facts = {Shape::kBytes + kMostVectors * 4 * Shape::kTileN, Shape::kStepBytes, kTurnsHeads<Shape>};
  });
  return facts;
}

// Every GPU of these levels has as much for a block.
constexpr int kLeastShared = 99 << 10;

bool multiplies(const Gpu& gpu, const Product& p) {
  if (is_int8_linear(p)) return gpu.capability >= 80;
  return !gpu.warpgroups && ((is_16_bit_linear(p) && gpu.capability >= 80 && p.k % 8 == 0) ||
                             (is_e4m3_linear(p) && gpu.capability >= 89 && p.n % 16 == 0 && p.k % 16 == 0));
}

bool has_ending(int variant, const Product& p) {
  const Epilogue& e = p.epilogue;
  if (MmaShapes::kVariants[variant].tile.split > 1 && !e.leaves_moments()) return false;
  if (!is_16_bit(p.a)) return is_plain(p) && (p.c != DType::e4m3 || is_gelu_or_gate(e));
  const bool plain_sums = e.activation == Activation::none && e.gate == Gate::none;
  if (e.residual) return e.leaves_moments() && p.before == Before::nothing && !e.heads && plain_sums;
  if (!e.heads) return true;
  return p.before == Before::nothing && plain_sums && e.heads.size == kTurnedHead && facts_of(variant).turns_heads;
}

// Where blocks divide k: each has steps, and there is room for their sums and counts.
bool divides(int variant, const Product& p) {
  const Tile& tile = MmaShapes::kVariants[variant].tile;
  return tile.split == 1 || (p.k * bytes_of(p.a) >= tile.split * int64_t{facts_of(variant).step_bytes} &&
                             part_bytes(tile, p.m, p.n) <= kLeastWorkspaceBytes &&
                             MmaCounts::has_room(p.m, tile.rows, over(p.n, tile.columns)));
}

// Offsets of rows have 32 bits (StepCopies).
bool has_offsets(const Product& p) {
  const int64_t row_bytes = p.a == DType::uint8 ? byte_row_bytes(p.k) : p.k * bytes_of(p.a);
  return std::max(p.m, p.n) * row_bytes <= (int64_t{1} << 32) - 128;
}

bool supports(const Gpu& gpu, int variant, const Product& p) {
  return multiplies(gpu, p) && has_offsets(p) && has_ending(variant, p) &&
         p.n % (p.epilogue.gate != Gate::none ? 16 : 8) == 0 &&
         over(p.m, MmaShapes::kVariants[variant].tile.rows) < (1 << 16) && divides(variant, p) &&
         std::max(p.n, p.k) < (1 << 24) && facts_of(variant).bytes <= std::max(gpu.shared_bytes, kLeastShared);
}

// A multiprocessor's blocks are there at once, `most` of them, or in waves. Microseconds: start + waves * steps * wait
// + blocks of a multiprocessor * (steps * step + ending), of steps of a block. Fitted to 192 products of BERT-base's,
// BERT-large's and MiniLM's layers with 8 to 16384 rows, on an H200 that ran code for 8.0: 4 to 8 % off in the mean;
// what these lines choose takes 1.013 times as long as the fastest of 24 shapes. No other GPU was measured: clocks
// divide all of it, and `step` is at least as long as the tensor cores need. No line was fitted to operands of 8 bits:
// they take the steps of their bytes, each as long, since the tensor cores multiply them at twice the rate.
struct Line {
  int most;
  double start, wait, step, ending;
};
constexpr Line kLines[] = {{5, 1.68, 0.0893, 0.0434, 0.165}, {4, 1.64, 0.1139, 0.0423, 0.356},
                           {3, 1.92, 0.1086, 0.1613, 0.491}, {3, 2.13, 0.1484, 0.2295, 0.596},
                           {2, 1.92, 0.1561, 0.3043, 0.977}, {2, 2.06, 0.1155, 0.1855, 1.349},
                           {2, 2.79, 0.1578, 0.2510, 1.351}, {6, 2.81, 0.1501, 0.0398, 0.227},
                           {4, 2.65, 0.2300, 0.0145, 0.538}, {3, 3.20, 0.2420, 0.0942, 1.257}};
static_assert(std::size(kLines) == MmaShapes::kCount);
constexpr double kActivation = 1.3;  // of 16384 elements on a multiprocessor, with erf GELU

double line_microseconds(const Gpu& gpu, int variant, const Product& p) {
  const Line& line = kLines[variant];
  const Facts facts = facts_of(variant);
  const Tile& tile = MmaShapes::kVariants[variant].tile;
  const double slower = kMeasuredHz / clock_of(gpu);
  const int room = gpu.shared_bytes_of_sm > 0 ? std::max(gpu.shared_bytes_of_sm / (facts.bytes + 1024), 1) : line.most;
  const int at_once = std::min(line.most, room);
  const int64_t blocks = over(p.m, tile.rows) * over(p.n, tile.columns) * tile.split,
                steps = over(over(p.k * bytes_of(p.a), facts.step_bytes), tile.split);
  const int64_t sms = std::max(gpu.sm_count, 1), of_sm = over(blocks, sms), waves = over(of_sm, at_once);
  const double area = static_cast<double>(tile.rows) * tile.columns;
  const double needed = area * (facts.step_bytes / 2) / (mma_rate(gpu) / static_cast<double>(sms));
  const Activation activation = p.epilogue.activation;
  const bool gelu = activation == Activation::gelu_erf || activation == Activation::gelu_tanh;
  const double activating = (p.epilogue.gate == Gate::pairs ? 0.5 : gelu ? 1.0 : 0.0) * kActivation * area / 16384;
  const double step = std::max(line.step * slower, needed);
  return slower * line.start + static_cast<double>(waves * steps) * line.wait * slower +
         static_cast<double>(of_sm) * (static_cast<double>(steps) * step + slower * (line.ending + activating));
}

OwnGuess guess(const Gpu& gpu, const Product& p) {
  OwnGuess best;
  for (int variant = 0; variant < MmaShapes::kCount; ++variant) {
    if (!supports(gpu, variant, p)) continue;
    if (const double us = line_microseconds(gpu, variant, p); us < best.us) best = {variant, us, p.m <= few_rows_of(p)};
  }
  if (is_reading(gpu, p)) best.us = std::max(best.us, 2.0 + reading_microseconds(gpu, p));
  return best;
}

constexpr Parts kReads{Part::bias,    Part::activation,     Part::gate,       Part::heads,          Part::residual,
                       Part::moments, Part::moments_beside, Part::other_norm, Part::norm_by_moments};

}  // namespace

const OwnKernel mma_tile{"mma_tile", MmaShapes::kVariants, kReads, supports, guess, run};

}  // namespace ftbert
