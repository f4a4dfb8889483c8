// Each head of queries and keys: its norm, then its rotation by the token's position, in place.
#include <omp.h>

#include <bit>
#include <cstdint>
#include <cstring>

#include "device/parallel_cpu.h"
#include "kernels/isa.h"
#include "kernels/norm/norm_row.h"

namespace ftbert::FTBERT_ISA {
namespace {

void read(const float* from, int64_t count, float* to) { std::memcpy(to, from, count * sizeof(float)); }
void read(const bfloat16_t* from, int64_t count, float* to) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = std::bit_cast<float>(static_cast<uint32_t>(from[i].bits) << 16);
}

void write(const float* from, int64_t count, float* to) { std::memcpy(to, from, count * sizeof(float)); }
// To the nearest, of two the even one.
void write(const float* from, int64_t count, bfloat16_t* to) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(from[i]);
    const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1), nan = bits | 0x400000;
    to[i].bits = static_cast<uint16_t>(((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded) >> 16);
  }
}

// Pair i is (x[2i], x[2i + 1]), or (x[i], x[i + pairs]).
template <bool kInterleaved>
void turn(float* x, const float* cosines, const float* sines, int64_t pairs) {
  constexpr int64_t kStep = kInterleaved ? 2 : 1;
  float* const other = x + (kInterleaved ? 1 : pairs);
#pragma omp simd
  for (int64_t i = 0; i < pairs; ++i) {
    const float a = x[i * kStep], b = other[i * kStep];
    x[i * kStep] = a * cosines[i] - b * sines[i];
    other[i * kStep] = b * cosines[i] + a * sines[i];
  }
}

template <class In>
void rotate(const Heads& heads, const HeadRules<float>& rules, int64_t rows, In* qkv) {
  const Rotation& rotation = rules.rotation;
  const int64_t pairs = rotation ? rotation.dims / 2 : 0, floats = heads.size + 2 * pairs;
  const bool many = rows * heads.qkv_width() > kSerialElements;
  float* const scratch = new float[(many ? omp_get_max_threads() : 1) * floats];
#pragma omp parallel if (many)
  {
    float* const head = scratch + omp_get_thread_num() * floats;
    float *const cosines = head + heads.size, *const sines = cosines + pairs;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const float* const angles = pairs > 0 ? rotation.table + 2 * rules.positions[row] * pairs : nullptr;
      for (int64_t i = 0; i < pairs; ++i) {
        cosines[i] = angles[2 * i];
        sines[i] = angles[2 * i + 1];
      }
      for (int64_t h = 0; h < heads.count + heads.kv; ++h) {
        In* const stored = qkv + row * heads.qkv_width() + h * heads.size;
        read(stored, heads.size, head);
        norm_row(head, h < heads.count ? rules.q_norm : rules.k_norm, heads.size, head);
        if (rotation.interleaved)
          turn<true>(head, cosines, sines, pairs);
        else
          turn<false>(head, cosines, sines, pairs);
        write(head, heads.size, stored);
      }
    }
  }
  delete[] scratch;
}

}  // namespace

void rotary(Context<Cpu>& context, const Heads& heads, const HeadRules<float>& rules, int64_t rows, const Operand& qkv,
            const CacheRows<float>& cache) {
  if (qkv.dtype() == DType::bf16)
    rotate(heads, rules, rows, static_cast<bfloat16_t*>(qkv.data));
  else
    rotate(heads, rules, rows, static_cast<float*>(qkv.data));
  if (cache) store_keys_values<Cpu, float>(context, heads, static_cast<const float*>(qkv.data), rows, cache);
}

}  // namespace ftbert::FTBERT_ISA
