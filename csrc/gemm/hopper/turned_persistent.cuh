// The ending of turned_product.h for wgmma_persistent: heads are normed and turned in the registers of the sums. Of a
// half-split pair one thread has both numbers; of a row's head, four threads next to each other have the numbers.
#pragma once
#include <type_traits>

#include "gemm/gpu/endings/turned_heads.cuh"
#include "gemm/gpu/turned_product.h"
#include "gemm/hopper/wgmma_persistent.cuh"

namespace ftbert {

// run_turned_persistent of A and B in E4M3.
template <class T>
void run_turned_e4m3(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data,
                     const Heads& heads, const HeadRules<T>& rules);

namespace {

// Product: the work of the product alone, PersistentWork or ScaledWork.
template <class E, class Product>
struct TurnedWork : Product {
  HeadTurn<E> turn;
};

// Rule: of queries' and keys' norms. All numbers of a head are in pairs, half a head apart.
template <class E, int kHead, class Rule, class Product>
struct Turned {
  using Element = E;
  using Work = TurnedWork<E, Product>;
  static constexpr int kApart = kHead / 16;  // accumulators between the numbers of a pair
  static_assert(16 * kApart == kHead);

  int begin;  // angles_of the row that has this lane's number

  __device__ Turned(const Work& work, int row0, int column0) {
    const int lane = threadIdx.x % 32;
    begin = column0 < work.turn.columns ? angles_of(work.turn, row0 + lane / 16 * 64 + lane % 16, work.m) : 0;
  }

  __device__ void finish(float (&sums)[kTileN / 8][4], char* memory, const Work& work, int row, int column0,
                         int half) const {
    if (column0 < work.turn.columns) {
#pragma unroll
      for (int r = 0; r < 2; ++r) turn_row(sums, r, work.turn, column0, half);
    }
    stage_sums<E>(sums, shared_address(memory));
    __syncwarp();
    store_sums<E, Activation::none>(memory, work, row, column0);
  }

 private:
  // The second or the first of this thread's rows.
  __device__ void turn_row(float (&sums)[kTileN / 8][4], int r, const HeadTurn<E>& turn, int column0, int half) const {
    const int lane = threadIdx.x % 32, from = __shfl_sync(~0u, begin, half * 16 + r * 8 + lane / 4);
    if constexpr (!std::is_same_v<Rule, NoRule>) {
#pragma unroll
      for (int h = 0; h < kTileN / kHead; ++h)
        if (column0 + h * kHead < turn.columns)
          normalise_row(sums, h, r, column0 + h * kHead < turn.query_columns ? turn.q_norm : turn.k_norm);
    }
    const float* const angles = turn.table + max(from, 0) + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < kApart; ++i) {
      float pairs[4];  // (c, s) of two
      Packed<float, 4>::load(angles + i * 16).to_floats(pairs);
#pragma unroll
      for (int h = 0; h < kTileN / kHead; ++h) {
        if (column0 + h * kHead >= turn.columns) break;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float cosine = from < 0 ? NAN : pairs[2 * c], sine = pairs[2 * c + 1];
          float& low = sums[h * 2 * kApart + i][2 * r + c];
          float& high = sums[h * 2 * kApart + i + kApart][2 * r + c];
          const float x = low, y = high;
          low = x * cosine - y * sine, high = y * cosine + x * sine;
        }
      }
    }
    asm volatile("" ::: "memory");  // the other row's angles are not loaded before
  }

  static __device__ void normalise_row(float (&sums)[kTileN / 8][4], int h, int r, const Norm<E>& norm) {
    const Rule rule{norm.eps, norm.offset};
    float squares = 0;
#pragma unroll
    for (int j = h * 2 * kApart; j < (h + 1) * 2 * kApart; ++j)
      squares += sums[j][2 * r] * sums[j][2 * r] + sums[j][2 * r + 1] * sums[j][2 * r + 1];
    const float scale = inverse_root_mean<4>(squares, 1.0f / kHead, norm.eps);
#pragma unroll
    for (int j = 0; j < 2 * kApart; ++j) {
      float gamma[2];
      Packed<E, 2>::load(norm.gamma + j * 8 + threadIdx.x % 4 * 2).to_floats(gamma);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = sums[h * 2 * kApart + j][2 * r + c];
        x = rule.template apply<E>(x, scale, gamma[c], 0.0f);
      }
    }
    asm volatile("" ::: "memory");
  }
};

// A: of A's and B's elements. of_product: the work of the product alone.
template <class A, class T, class Of>
void launch_turned(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data,
                   const Heads& heads, const HeadRules<T>& rules, const Of& of_product) {
  using E = native_t<T>;
  const TurnedWork<E, Of> work{of_product, head_turn(heads, rules)};
  with_norm_rule(rules.q_norm, [&]<class Rule>() {
    if constexpr (!std::is_same_v<Rule, LayerRule>) {
      const auto run = [&]<int kHead>() {
        launch_persistent<A, Turned<E, kHead, Rule, Of>>(context, "kernel turned_persistent", variant, product, data,
                                                         work);
      };
      heads.size == 64 ? run.template operator()<64>() : run.template operator()<128>();
    }
  });
}

}  // namespace
}  // namespace ftbert
