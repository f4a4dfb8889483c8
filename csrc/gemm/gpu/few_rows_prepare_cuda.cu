// Rows of a for products of few rows, normed, as b's storage wishes them: by a kernel ahead of the product, where the
// blocks that multiply do not lay them out. Prepared, 8 rows of a layer of Llama-2-7B take 112 us in Q8_0, laid out 167
// (H100).
#include <type_traits>

#include "device/launch.cuh"
#include "gemm/gpu/few_rows_launch.cuh"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

// A block a row, to work.prepared, in rows of work.row_bytes.
template <class E, class Storage>
__global__ void __launch_bounds__(kPrepareThreads) prepare_rows_kernel(const __grid_constant__ FewRows<E> work) {
  const LaidRow<E, kPreparePacks> row(work, blockIdx.x, kPrepareThreads);
  wait_for_inputs();
  row.template lay<Storage, true>(work, const_cast<char*>(work.prepared),
                                  [](float x, int) { return reduce<kPrepareThreads>(x, Sum()); });
}

template <class E, Q8Order kOrder>
void launch(const Context<Cuda>& context, FewRows<E> work) {
  work.row_bytes = work.prepared_bytes;
  launch_overlapped(context, "kernel prepare_rows", prepare_rows_kernel<E, Q8Tiles<E, kOrder>>,
                    static_cast<unsigned>(work.m), kPrepareThreads, size_t{0}, 1, work);
}

}  // namespace

template <class E>
void prepare_rows(const Context<Cuda>& context, const Format* b, Q8Order order, FewRows<E>& work) {
  const bool q8 = b == &formats::q8_0;
  if (!q8 && work.norm.kind == NormKind::none) {
    work.prepared = reinterpret_cast<const char*>(work.a), work.prepared_bytes = work.k * static_cast<int>(sizeof(E));
    return;
  }
  if (work.m <= kMostLaidRows && work.m * work.k <= kMostLaidColumns) return;
  FTBERT_CHECK(
      context.gemm_workspace && context.gemm_workspace_bytes >= kMostFewRows * kMostPreparedColumns * sizeof(E),
      "a product of few rows needs Context::gemm_workspace");
  work.prepared = static_cast<const char*>(context.gemm_workspace);
  if (q8) {
    work.prepared_bytes = work.k;
    order == Q8Order::columns ? launch<E, Q8Order::columns>(context, work) : launch<E, Q8Order::lanes>(context, work);
  } else {
    using T = std::conditional_t<std::is_same_v<E, __half>, half_t, bfloat16_t>;
    work.prepared_bytes = work.k * static_cast<int>(sizeof(E));
    Context<Cuda> same = context;
    add_bias_input_layernorm<Cuda, T>(same, reinterpret_cast<const T*>(work.a), nullptr, nullptr,
                                      norm_over<T>(work.norm), work.m, work.k,
                                      {.copy = Operand::of(static_cast<T*>(context.gemm_workspace))});
  }
}

template void prepare_rows(const Context<Cuda>&, const Format*, Q8Order, FewRows<__half>&);
template void prepare_rows(const Context<Cuda>&, const Format*, Q8Order, FewRows<__nv_bfloat16>&);

}  // namespace ftbert
