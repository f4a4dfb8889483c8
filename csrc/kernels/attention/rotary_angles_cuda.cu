// amplitude * (cosine, sine) of each token's position * frequency, by the length of its sequence, [tokens, pairs, 2].
#include <algorithm>

#include "device/launch.cuh"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

constexpr int kThreads = 256;
constexpr int kFrequencies = 64;  // of a launch: they are arguments

struct Frequencies {
  double of[kFrequencies];
};

// The sequence of a token: the last that begins at it or before. cu_seqlens [count + 1].
__device__ int64_t sequence_of(const int32_t* cu_seqlens, int64_t count, int64_t token) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (cu_seqlens[middle] <= token ? low : high) = middle;
  }
  return low;
}

// From pair `first` on `pairs` of them; row_pairs: of all.
__global__ void __launch_bounds__(kThreads)
    rotary_angles_kernel(Frequencies frequencies, int first, int pairs, int row_pairs, double amplitude,
                         Stretch stretch, const int32_t* positions, const int32_t* cu_seqlens, int64_t count,
                         int64_t tokens, float2* table, int32_t* rows) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < tokens * pairs;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t token = i / pairs;
    const int pair = static_cast<int>(i % pairs);
    float2 turned{0, 0};
    if (token < cu_seqlens[count]) {
      const int64_t s = sequence_of(cu_seqlens, count, token);
      const double over = static_cast<double>(cu_seqlens[s + 1] - cu_seqlens[s]) / stretch.trained - 1;
      const double share = static_cast<double>(first + pair) / (row_pairs - 1);
      const double of = frequencies.of[pair] * (over > 0 ? pow(1 + stretch.factor * over, -share) : 1);
      double sine, cosine;
      sincos(positions[token] * of, &sine, &cosine);
      turned = {static_cast<float>(amplitude * cosine), static_cast<float>(amplitude * sine)};
    }
    table[token * row_pairs + first + pair] = turned;
    if (first + pair == 0) rows[token] = static_cast<int32_t>(token);
  }
}

}  // namespace

template <>
void rotary_angles<Cuda>(Context<Cuda>& context, const double* frequencies, int64_t pairs, double amplitude,
                         const Stretch& stretch, const int32_t* positions, const int32_t* cu_seqlens, int64_t count,
                         int64_t tokens, float* table, int32_t* rows) {
  for (int64_t first = 0; first < pairs; first += kFrequencies) {
    const int64_t some = std::min<int64_t>(kFrequencies, pairs - first);
    Frequencies given{};
    std::copy(frequencies + first, frequencies + first + some, given.of);
    const int64_t blocks = std::min<int64_t>((tokens * some + kThreads - 1) / kThreads, 16 * context.sm_count);
    if (blocks == 0) return;
    launch_kernel(context, "kernel rotary_angles", rotary_angles_kernel, static_cast<unsigned>(blocks), kThreads, given,
                  static_cast<int>(first), static_cast<int>(some), static_cast<int>(pairs), amplitude, stretch,
                  positions, cu_seqlens, count, tokens, reinterpret_cast<float2*>(table), rows);
  }
}

}  // namespace ftbert
