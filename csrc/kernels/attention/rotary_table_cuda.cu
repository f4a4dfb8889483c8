// amplitude * (cosine, sine) of position * frequency, [positions, pairs, 2].
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

// table: from the first of these frequencies on; row_pairs: of all.
__global__ void __launch_bounds__(kThreads) rotary_table_kernel(Frequencies frequencies, int pairs, double amplitude,
                                                                int64_t positions, int64_t row_pairs, float2* table) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < positions * pairs;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t position = i / pairs;
    const int pair = static_cast<int>(i % pairs);
    double sine, cosine;
    sincos(static_cast<double>(position) * frequencies.of[pair], &sine, &cosine);
    table[position * row_pairs + pair] = {static_cast<float>(amplitude * cosine), static_cast<float>(amplitude * sine)};
  }
}

}  // namespace

template <>
void rotary_table<Cuda>(Context<Cuda>& context, const double* frequencies, int64_t pairs, double amplitude,
                        int64_t positions, float* table) {
  for (int64_t first = 0; first < pairs; first += kFrequencies) {
    const int64_t count = std::min<int64_t>(kFrequencies, pairs - first);
    Frequencies some{};
    std::copy(frequencies + first, frequencies + first + count, some.of);
    const int64_t blocks = std::min<int64_t>((positions * count + kThreads - 1) / kThreads, 16 * context.sm_count);
    if (blocks == 0) return;
    launch_kernel(context, "kernel rotary_table", rotary_table_kernel, static_cast<unsigned>(blocks), kThreads, some,
                  count, amplitude, positions, pairs, reinterpret_cast<float2*>(table) + first);
  }
}

}  // namespace ftbert
