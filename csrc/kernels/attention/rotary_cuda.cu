// Each head of queries and keys: its norm, then its rotation by the token's position, in place; or, of keys and then
// values too, in a cache. A group of neighbouring threads takes one head of one row; a thread holds both numbers of its
// pairs.
#include <climits>
#include <cmath>
#include <cstdint>

#include "core/check.h"
#include "core/dispatch.h"
#include "device/launch.cuh"
#include "kernels/attention/head_rules.cuh"

namespace ftbert {
namespace {

constexpr int kThreads = 128;

// G threads a head, each with one unit in registers; kLong: with several, which are read again for every pass.
// heads: of queries, `queries` of them, then of keys, and with a cache of values.
template <int W, int G, bool kLong, class E>
__global__ void __launch_bounds__(kThreads)
    rotary_kernel(E* qkv, int64_t stride, int64_t items, int heads, int queries, int turned, int size, Norm<E> q_norm,
                  Norm<E> k_norm, Rotation rotation, const int32_t* positions, CacheRows<E> cache) {
  const int64_t item = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / G, row = item / heads;
  const int lane = threadIdx.x % G, head = static_cast<int>(item % heads);
  const bool value = head >= turned;  // of a row that is stored as it is
  const int pairs = rotation.table != nullptr && !value ? static_cast<int>(rotation.dims / 2) : 0;
  const int units = (size + 2 * W - 1) / (2 * W), end = item < items ? units : 0;

  // What stood there before the kernel ahead began.
  const float* row_angles = rotation.table;
  bool inside = true;
  if (pairs > 0 && end > 0) {
    const int position = positions[row];
    inside = position >= 0 && position < rotation.positions;
    row_angles += inside ? position * rotation.dims : 0;
  }
  const Unit<W> first(lane, pairs, rotation.interleaved, size);
  float held[2 * W] = {}, angles[2 * W] = {};
  if (!kLong && lane < end && first.turned) load_angles<W>(row_angles + 2 * lane * W, angles);
  wait_for_inputs();

  E* const at = qkv + row * stride + int64_t{head} * size;
  E* to = at;
  if (cache.rows != nullptr && head >= queries && item < items) {
    const int64_t stored = cache.rows[row];
    to = stored < 0 || stored >= cache.count ? nullptr
         : value                             ? cache.values + (stored * (turned - queries) + head - turned) * size
                                             : cache.keys + (stored * (turned - queries) + head - queries) * size;
  }
  if (!kLong && lane < end) first.load(at, held);
  const auto each_unit = [&](auto&& f) {
    if constexpr (kLong) {
#pragma unroll 1
      for (int i = lane; i < end; i += G) {
        const Unit<W> unit(i, pairs, rotation.interleaved, size);
        unit.load(at, held);
        if (unit.turned) load_angles<W>(row_angles + 2 * i * W, angles);
        f(unit);
      }
    } else if (lane < end) {
      f(first);
    }
  };

  const Norm<E> norm = value ? Norm<E>() : head < queries ? q_norm : k_norm;
  const bool centred = q_norm.kind == NormKind::layer || k_norm.kind == NormKind::layer;
  const bool normed = q_norm.kind != NormKind::none || k_norm.kind != NormKind::none;
  const float2 moments = moments_of_head<G>(norm, centred, normed, size, held, each_unit);
  each_unit([&](const Unit<W>& unit) {
    if (norm.kind != NormKind::none) normalise(unit, norm, moments.x, moments.y, held);
    if (unit.turned) turn<W>(held, angles, rotation.interleaved);
    if (!inside && !value) unit.each([&](int w) { held[w] = NAN; });
    if (to != nullptr) unit.store(held, to);
  });
}

}  // namespace

template <class Device, class T>
void rotary(Context<Device>& context, const Heads& heads, const HeadRules<T>& rules, int64_t rows, const Operand& qkv,
            const CacheRows<T>& cache) {
  const auto& [q_norm, k_norm, rotation, positions] = rules;
  if (rows == 0) return;
  using E = native_t<T>;
  T* const x = qkv.as<T>();
  const int64_t stride = heads.qkv_width(), turned = heads.count + heads.kv, each = cache ? turned + heads.kv : turned,
                items = rows * each;
  FTBERT_CHECK(stride < (1 << 30), "rotary: a row has at most 2^30 elements, got ", stride);
  FTBERT_CHECK(!rotation || positions, "rotary: there is a table, but no positions given");
  const CacheRows<E> stored{cache.rows, cache.count, native(cache.keys), native(cache.values)};
  const auto launch = [&]<int W, int G, bool kLong>() {
    const int64_t blocks = (items + kThreads / G - 1) / (kThreads / G);
    FTBERT_CHECK(blocks <= INT_MAX, "rotary: too many rows, ", rows);
    launch_overlapped(context, "kernel rotary", rotary_kernel<W, G, kLong, E>, dim3(static_cast<unsigned>(blocks)),
                      kThreads, 0, 1, native(x), stride, items, each, heads.count, turned, heads.size, native(q_norm),
                      native(k_norm), rotation, positions, stored);
  };
  const auto launch_width = [&]<int W>() {
    const int64_t units = (heads.size + 2 * W - 1) / (2 * W);
    if (units > 32) return launch.template operator()<W, 32, true>();
    if constexpr (W > 1) {
      if (units <= 2) return launch.template operator()<W, 2, false>();
      if (units <= 4) return launch.template operator()<W, 4, false>();
      if (units <= 8) return launch.template operator()<W, 8, false>();
      if (units <= 16) return launch.template operator()<W, 16, false>();
    }
    launch.template operator()<W, 32, false>();
  };
  constexpr int kUnit = 2 * kWidth<T>;
  const bool wide = vectorizable(kWidth<T>, stride, x, cache.keys, cache.values, q_norm.gamma, q_norm.beta,
                                 k_norm.gamma, k_norm.beta) &&
                    vectorizable(4, 0, rotation.table) && heads.size % kUnit == 0 &&
                    (!rotation || rotation.dims % kUnit == 0);
  with_width<kWidth<T>>(wide, launch_width);
}

FTBERT_INSTANTIATE_CUDA(rotary, Cuda)

}  // namespace ftbert
