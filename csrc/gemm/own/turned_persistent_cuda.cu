// wgmma_persistent with the ending of turned_product.h.
#include "core/check.h"
#include "gemm/own/turned_heads.cuh"
#include "gemm/own/turned_product.h"
#include "gemm/own/wgmma_persistent.cuh"

namespace ftbert {
namespace {

template <class E>
struct TurnedWork : PersistentWork {
  HeadTurn<E> turn;
};

template <class E, int kHead>
struct Turned {
  using Work = TurnedWork<E>;
  using Rows = TurnedRows<E, kHead, kTileN, false>;
  static_assert(8 * kTileN * sizeof(float) <= kSumBytes);

  int begin;  // angles_of the row that has this lane's number

  __device__ Turned(const Work& work, int row0, int column0) {
    const int lane = threadIdx.x % 32;
    begin = column0 < work.turn.columns ? angles_of(work.turn, row0 + lane / 16 * 64 + lane % 16, work.m) : 0;
  }

  __device__ void finish(const float (&sums)[kTileN / 8][4], const E* bias, char* memory, const Work& work, int row,
                         int column0, int half) const {
    float* const shared = reinterpret_cast<float*>(memory);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int first = half * 16 + r * 8;
      const int64_t row0 = row + r * 8;
      Rows rows;
      rows.look_ahead(work.turn, begin, first);
      Rows::stage(shared, [&](int j) -> float2 {
        float b[2];
        Packed<E, 2>::load(bias + j * 8 + threadIdx.x % 4 * 2).to_floats(b);
        return {sums[j][2 * r] + b[0], sums[j][2 * r + 1] + b[1]};
      });
      rows.finish(work.turn, begin, first, shared, static_cast<E*>(work.c) + row0 * work.n, rows_left(work.m - row0),
                  work.n, column0);
    }
  }
};

}  // namespace

template <class T>
void run_turned_persistent(const Context<Cuda>& context, const Product& product, const ProductData& data,
                           const Heads& heads, const HeadRules<T>& rules) {
  using E = native_t<T>;
  const TurnedWork<E> work{work_of(product, data, context.sm_count), head_turn(heads, rules)};
  const auto run = [&]<int kHead>() {
    launch_persistent<E, Turned<E, kHead>>(context, "kernel turned_persistent", product, data, work);
  };
  heads.size == 64 ? run.template operator()<64>() : run.template operator()<128>();
}

#define FTBERT_INSTANTIATE(T)                                                                                 \
  template void run_turned_persistent(const Context<Cuda>&, const Product&, const ProductData&, const Heads&, \
                                      const HeadRules<T>&);
FTBERT_INSTANTIATE(half_t)
FTBERT_INSTANTIATE(bfloat16_t)

}  // namespace ftbert
