// Vectors of integers of the instruction set's width, and sums of products of bytes on them: of unsigned by signed
// bytes (AVX-512 VNNI, AVX-VNNI), or of both widened to 16 bits (AVX2). With AVX-512 and no VNNI they take as many
// instructions as float's.
#pragma once
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define FTBERT_VNNI
#endif
#if defined(FTBERT_VNNI) || (defined(__AVX2__) && !defined(__AVX512F__))
#define FTBERT_INT8
#endif
#include <cstdint>
#include <cstring>

#include "device/simd_math.h"

namespace ftbert::FTBERT_ISA::simd {

using Integers __attribute__((vector_size(kLanes * sizeof(int32_t)), aligned(4), may_alias)) = int32_t;

inline Integers load_integers(const void* p) { return *static_cast<const Integers*>(p); }
inline void store_integers(int32_t* p, Integers v) { *reinterpret_cast<Integers*>(p) = v; }

#ifdef FTBERT_VNNI
// sums + in each lane four products of bytes (unsigned) and weights (signed)
inline Integers add_products(Integers sums, Integers bytes, Integers weights) {
#ifdef __AVX512VNNI__
  return reinterpret_cast<Integers>(_mm512_dpbusd_epi32(
      reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(bytes), reinterpret_cast<__m512i>(weights)));
#else
  return reinterpret_cast<Integers>(_mm256_dpbusd_avx_epi32(
      reinterpret_cast<__m256i>(sums), reinterpret_cast<__m256i>(bytes), reinterpret_cast<__m256i>(weights)));
#endif
}
#elif defined(FTBERT_INT8)
// The same four in each lane. Through a float: GCC broadcasts that from memory, an integer from a register.
inline Integers four_bytes(const uint8_t* p) {
  float four;
  std::memcpy(&four, p, sizeof(four));
  return reinterpret_cast<Integers>(_mm256_set1_ps(four));
}
// Of the four bytes in each lane the first and the third, or the second and the fourth, as 16 bits each.
inline Integers even_bytes(Integers unsigned_bytes) { return unsigned_bytes & 0x00ff00ff; }
inline Integers odd_bytes(Integers unsigned_bytes) {
  return reinterpret_cast<Integers>(_mm256_srli_epi16(reinterpret_cast<__m256i>(unsigned_bytes), 8));
}
inline Integers even_weights(Integers signed_bytes) {
  const __m256i high = _mm256_slli_epi16(reinterpret_cast<__m256i>(signed_bytes), 8);
  return reinterpret_cast<Integers>(_mm256_srai_epi16(high, 8));
}
inline Integers odd_weights(Integers signed_bytes) {
  return reinterpret_cast<Integers>(_mm256_srai_epi16(reinterpret_cast<__m256i>(signed_bytes), 8));
}
// sums + in each lane two products of 16 bits
inline Integers add_pairs(Integers sums, Integers a, Integers b) {
  return sums +
         reinterpret_cast<Integers>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}
#endif

}  // namespace ftbert::FTBERT_ISA::simd
