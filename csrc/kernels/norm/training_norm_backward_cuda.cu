// The gradients of y = norm(x): which kernel makes them, and the sums over the parts of the rows.
#include "kernels/norm/training_norm_backward.cuh"

namespace ftbert {
namespace {

constexpr int kSumColumns = 32, kSumParts = 32;  // of a block

// grad_gamma and grad_beta (blockIdx.y 0 and 1) of partials [2, parts, cols]. times_gamma: the first have to be divided
// by gamma.
__global__ void __launch_bounds__(kSumColumns* kSumParts)
    sum_norm_partials(const float* partials, int parts, int cols, bool times_gamma, Vector gamma, float offset,
                      float eps, AnyRows<1> grad_gamma, AnyRows<1> grad_beta) {
  __shared__ float shared[kSumParts][kSumColumns];
  const int lane = threadIdx.x % kSumColumns, part = threadIdx.x / kSumColumns;
  const int col = static_cast<int>(blockIdx.x) * kSumColumns + lane;
  const AnyRows<1> to = blockIdx.y == 0 ? grad_gamma : grad_beta;
  wait_for_inputs();
  if (!to) return;
  float total = 0;
  if (col < cols) {
#pragma unroll 4
    for (int p = part; p < parts; p += kSumParts) total += partials[(int64_t{blockIdx.y} * parts + p) * cols + col];
  }
  shared[part][lane] = total;
  __syncthreads();
  if (part > 0 || col >= cols) return;
#pragma unroll
  for (int p = 1; p < kSumParts; ++p) total += shared[p][lane];
  if (blockIdx.y == 0 && times_gamma) total *= inverse_gamma(gamma_at(gamma, col, offset), eps);
  const float one[1] = {total};
  to.store(col, one);
}

}  // namespace

template BackwardParts norm_backward_plain<float>(Context<Cuda>&, const NormBackward&);

int64_t norm_partials(const Context<Cuda>& context, int64_t rows) { return std::min<int64_t>(rows, context.sm_count); }

void norm_backward(Context<Cuda>& context, const NormBackward& norm) {
  if (norm.rows == 0 || norm.cols == 0) return;
  BackwardParts made{};
  const auto any = [&]<class Rows>() {
    made = launch_backward<Rows>(context, norm);
    if (made.parts == 0)
      made = {norm.kind == NormKind::layer ? launch_backward_long<Rows, true>(context, norm)
                                           : launch_backward_long<Rows, false>(context, norm),
              false};
  };
  with_rows_of(norm.cols, {norm.grad, norm.grad_sum, norm.saved, norm.grad_x}, any, [&]<class T>() {
    made = norm_backward_plain<T>(context, norm);
    return made.parts > 0;
  });
  if (!norm.grad_gamma && !norm.grad_beta) return;
  const auto blocks = static_cast<unsigned>((norm.cols + kSumColumns - 1) / kSumColumns);
  launch_overlapped(context, "kernel sum_norm_partials", sum_norm_partials, dim3(blocks, norm.grad_beta ? 2 : 1),
                    kSumColumns * kSumParts, 0, 1, norm.partials, static_cast<int>(made.parts),
                    static_cast<int>(norm.cols), made.times_gamma, norm.gamma, norm.offset, norm.eps, norm.grad_gamma,
                    norm.grad_beta);
}

}  // namespace ftbert
