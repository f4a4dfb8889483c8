// How long a kernel of ours is expected to take: about as long as the waves of its blocks, and a wave as its steps of
// k.
//
// The lines of 16-bit operands were fitted to 448 products of three models with 1056 to 16384 rows on an H200
// (4 % off in the mean). Layers that run what these lines find the fastest took 1.008 times as long as with a table of
// measured choices, in the geometric mean of 57 sizes from 1026 to 16384 rows; BERT-large's, whose k of 4096 meets a
// last wave that cuBLASLt's tiles fill better, 1.015 times. Another Hopper has other clocks, which divide all lines
// alike; its multiprocessors count. Where lines for E4M3 come from, the kernels' guesses say.
//
// By a weight of 16 bits larger than those models have (kLargeWeight), a step of k takes longer, and cuBLASLt is the
// faster one for most numbers of rows. Of 92 products of Qwen3-4B's and Llama-2-7B's kind with 64 to 8192 rows, each
// measured by cuBLASLt's first proposal and by ours, what is guessed here takes 1.008 times as long as the faster of
// both in the geometric mean and 1.18 times at most, by the lines as they are 1.092 and 1.45 times (H100; products
// alone, without a norm or what `rotary` does); wgmma_tile then took all of up to 128 rows.
#pragma once
#include <cstdint>

#include "core/gpu.h"
#include "gemm/product.h"

namespace ftbert {

inline constexpr int64_t kLargeWeight = 10 << 20;  // numbers: 2560 x 4096, the smallest of those products'
constexpr bool has_large_weight(const Product& p) {
  return (p.b == &formats::fp16 || p.b == &formats::bf16) && p.n * p.k >= kLargeWeight;
}

// Few rows by such a weight in E4M3, which comes from memory, not from L2: they take longer than kernels' lines say.
// The lines' factors were chosen by the four products of T5-XXL's layers with 16 to 160 rows (H200).
constexpr bool reads_large_e4m3(const Product& p) {
  return p.a == DType::e4m3 && p.n * p.k >= kLargeWeight && p.m <= 192;
}

// Up to here cuBLASLt and wgmma_persistent were not measured product by product, wgmma_tile was in layers, which defer
// their norms to the next product. By large weights cuBLASLt was the faster one from 65 rows on: with 77 to 118 rows of
// 4096x4096, 4096x10240 and 12288x4096 (n x k, H200) it took 0.64 to 0.91 of the time of the best of ours, whose last
// boxes then had rows beyond the edge; without these it takes 0.96 to 1.17, and this limit is older.
// With a gate inside, which is a kernel of its own behind cuBLASLt's product, ours took as long (20480x4096, 77 rows).
// A layer with such a product does not defer its norms there, which was not measured.
inline constexpr int64_t kFewRows = 1024;
constexpr int64_t few_rows_of(const Product& p) {
  return !has_large_weight(p) ? kFewRows : p.epilogue.gate != Gate::none ? 128 : 64;
}

// Up to eight rows by a weight that is too large for the L2 cache take the time of reading it: more than 0.64 of an
// H100's cache in 16 bits, at 0.78 of its memory's rate. Other GPUs are taken to be alike.
inline bool is_reading(const Gpu& gpu, const Product& p) {
  const bool known = !gpu.warpgroups && gpu.l2_bytes > 0;
  const auto bytes = static_cast<double>(p.n * p.k * static_cast<int64_t>(sizeof(half_t)));
  return p.m <= 8 && bytes >= (known ? 0.64 * static_cast<double>(gpu.l2_bytes) : 1 << 25);
}
inline double reading_microseconds(const Gpu& gpu, const Product& p) {
  const double rate = gpu.warpgroups || gpu.bandwidth <= 0 ? 2.6e6 : 0.78e-6 * gpu.bandwidth;
  return static_cast<double>(p.b->bytes(p.n, p.k)) / rate;
}

constexpr int64_t over(int64_t of, int64_t size) { return (of + size - 1) / size; }

// Microseconds: start + waves * (step * ceil(k's bytes / 128) + wave + gelu, if there is one) + area * m * n / 10^6. A
// gate takes half of gelu, since it activates half of the sums; that is no measurement.
struct TimeLine {
  int variant;
  double start, step, wave, gelu, area;
};

inline double microseconds(const TimeLine& line, double waves, const Product& p) {
  const double step = has_large_weight(p) ? 1.2 * line.step : line.step;
  const double million = 1e-6 * static_cast<double>(p.m) * static_cast<double>(p.n);
  const Activation activation = p.epilogue.activation;
  const bool gelu = activation == Activation::gelu_erf || activation == Activation::gelu_tanh;
  const double activating = p.epilogue.gate == Gate::pairs ? line.gelu / 2 : gelu ? line.gelu : 0;
  return line.start + waves * (step * static_cast<double>(over(p.k * bytes_of(p.a), 128)) + line.wave + activating) +
         line.area * million;
}

// A GPU's rates a microsecond, of GPUs that nobody measured: sums of 16-bit products by mma.sync (NVIDIA's white papers
// of GA100, GA102 and AD102; those of GeForce have half of that where they add in float, which the driver does not
// tell), and bytes of its memory.
inline constexpr double kMeasuredHz = 1.98e9;  // of the H200 that ran code for 8.0
inline constexpr double kUnknownHz = 1.5e9, kUnknownBytes = 6e11;
inline double clock_of(const Gpu& gpu) { return gpu.clock_khz > 0 ? 1e3 * gpu.clock_khz : kUnknownHz; }
inline double mma_rate(const Gpu& gpu) {
  const int own = gpu.device_capability;
  const bool large = own == 80 || (own >= 90 && own < 120);
  return gpu.sm_count * (large ? 1024 : 512) * clock_of(gpu) * 1e-6;
}
inline double memory_rate(const Gpu& gpu) { return (gpu.bandwidth > 0 ? gpu.bandwidth : kUnknownBytes) * 1e-6; }

}  // namespace ftbert
