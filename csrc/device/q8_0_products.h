// What products in q8_0 are made of on a CPU: fours of bytes multiplied and added up, and scales widened.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>

#include "core/types.h"
#include "device/int8_products.h"

namespace ftbert::FTBERT_ISA::simd {

// Sums begin at what turns numbers that are 128 too large into what they stand for, -128 * the other operand's sum; or
// at 0, where add_turned does not take them as they lie.
#ifdef FTBERT_VNNI
inline constexpr int32_t kTurnedBy = 128;
#else
inline constexpr int32_t kTurnedBy = 0;
#endif

// sums + in each lane four products of numbers, which lie there with their highest bit turned, and x, -127 to 127.
inline Integers add_turned(Integers sums, Integers turned, Integers x) {
#if defined(FTBERT_VNNI)
  return add_products(sums, turned, x);
#elif defined(__AVX512BW__)
  // |w| times x with the sign of w: two products of these, at most 128 * 127 each, are no more than 16 bits hold.
  const __m512i w = _mm512_xor_si512(reinterpret_cast<__m512i>(turned), _mm512_set1_epi8(-128));
  const auto bytes = reinterpret_cast<__m512i>(x);
  const __m512i with_sign = _mm512_mask_sub_epi8(bytes, _mm512_movepi8_mask(w), _mm512_setzero_si512(), bytes);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), with_sign);
  return sums + reinterpret_cast<Integers>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#elif defined(__AVX2__)
  const __m256i w = _mm256_xor_si256(reinterpret_cast<__m256i>(turned), _mm256_set1_epi8(-128));
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(reinterpret_cast<__m256i>(x), w));
  return sums + reinterpret_cast<Integers>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#else
  using Bytes __attribute__((vector_size(sizeof(Integers)))) = int8_t;
  const Bytes w = reinterpret_cast<Bytes>(turned) ^ static_cast<int8_t>(-128), bytes = reinterpret_cast<Bytes>(x);
  for (int i = 0; i < 4 * kLanes; ++i) sums[i / 4] += w[i] * bytes[i];
  return sums;
#endif
}

// kLanes numbers of fp16.
inline Vector load_halves(const void* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vector>(_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))));
#elif defined(__F16C__)
  return reinterpret_cast<Vector>(_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))));
#else
  Vector made;
  for (int i = 0; i < kLanes; ++i) {
    uint16_t half;
    std::memcpy(&half, static_cast<const char*>(p) + i * sizeof(half), sizeof(half));
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = static_cast<uint32_t>(half & 0x7fff) << 13;
    // The exponent's bias is 112 less; denormals come out right by a multiplication, infinity and NaN by all ones.
    const uint32_t number = std::bit_cast<uint32_t>(std::bit_cast<float>(rest) * 0x1p112f);
    made[i] = std::bit_cast<float>(sign | (rest < 0x0f800000 ? number : rest | 0x7f800000));
  }
  return made;
#endif
}

}  // namespace ftbert::FTBERT_ISA::simd
