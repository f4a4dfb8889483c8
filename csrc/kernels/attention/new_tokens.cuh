// Tokens that attention itself puts into the cache, one a sequence: what the kernel `rotary` makes of a token's heads,
// by each block that reads some of them.
#pragma once
#include <bit>
#include <cstdint>

#include "device/vector.cuh"
#include "kernels/attention/head_rules.cuh"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

// Each sequence's token, where it is not in the cache yet: its queries, keys and values lie side by side as a product
// left them, and become what `rotary` makes of them here.
template <class E>
struct NewTokens {
  Norm<E> q_norm, k_norm;  // [head_size]
  Rotation rotation;
  const int32_t* positions = nullptr;    // [queries], of a rotation
  int64_t keys_at = 0, values_at = 0;    // in a row of q
  int64_t rows = 0;                      // of the cache
  E *keys = nullptr, *values = nullptr;  // the cache, k and v; nullptr: tokens are in it
};

// Neighbouring threads that make a head, a unit each.
template <class E, int kHeadSize>
struct HeadGroup {
  static constexpr int kWide = kWidth<E>, kUnits = kHeadSize / (2 * kWide);
  static constexpr int kThreads = static_cast<int>(std::bit_ceil(static_cast<unsigned>(kUnits)));
  static_assert(kHeadSize % (2 * kWide) == 0 && kThreads <= 32);
};

// fresh: heads of the token's queries, and with keys_too its key and value, which with `stores` go to `at` in the cache
// as well. q: the block's first head in the token's row, kv: the first number of the row and of the head of keys.
template <int kThreads, class E, int kCount, int kHeadSize>
__device__ void make_fresh(const NewTokens<E>& token, const E* q, const E* kv, int place, int heads, bool keys_too,
                           bool stores, int64_t at, E (&fresh)[kCount][kHeadSize]) {
  using Group = HeadGroup<E, kHeadSize>;
  constexpr int kWide = Group::kWide, kUnits = Group::kUnits, kGroup = Group::kThreads;
  constexpr int kAtATime = kThreads / kGroup, kKey = kCount - 2;
  const Norm<E>&q_norm = token.q_norm, &k_norm = token.k_norm;
  const bool centred = q_norm.kind == NormKind::layer || k_norm.kind == NormKind::layer;
  const bool normed = q_norm.kind != NormKind::none || k_norm.kind != NormKind::none;
  const bool inside = token.rotation.table == nullptr || (place >= 0 && place < token.rotation.positions);
  const int own = static_cast<int>(threadIdx.x) % kGroup;
#pragma unroll
  for (int first = 0; first < kCount; first += kAtATime) {
    const int which = first + static_cast<int>(threadIdx.x) / kGroup;
    const bool query = which < kKey, value = which == kKey + 1;
    const bool there = own < kUnits && (query ? which < heads : which < kCount && keys_too);
    const E* const from = query ? q + which * kHeadSize : kv + (value ? token.values_at : token.keys_at);
    const int pairs = token.rotation.table != nullptr && !value ? static_cast<int>(token.rotation.dims / 2) : 0;
    const Unit<kWide> unit(own, pairs, token.rotation.interleaved, kHeadSize);
    float held[2 * kWide] = {}, angles[2 * kWide] = {};
    if (there) unit.load(from, held);
    if (there && unit.turned)
      load_angles<kWide>(token.rotation.table + (inside ? place * token.rotation.dims : 0) + 2 * own * kWide, angles);
    const Norm<E> norm = value ? Norm<E>() : query ? q_norm : k_norm;
    const float2 moments = moments_of_head<kGroup>(norm, centred, normed, kHeadSize, held, [&](const auto& f) {
      if (there) f(unit);
    });
    if (!there) continue;
    if (norm.kind != NormKind::none) normalise(unit, norm, moments.x, moments.y, held);
    if (unit.turned) turn<kWide>(held, angles, token.rotation.interleaved);
    if (!inside && !value) unit.each([&](int w) { held[w] = NAN; });
    unit.store(held, fresh[which]);
    if (!query && stores) unit.store(held, (value ? token.values : token.keys) + at);
  }
}

}  // namespace
}  // namespace ftbert
