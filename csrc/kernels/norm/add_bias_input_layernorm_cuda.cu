// out = norm(x + bias + input), one pass over each row.
#include <array>
#include <atomic>

#include "core/check.h"
#include "core/cuda_check.h"
#include "core/dispatch.h"
#include "device/launch.cuh"
#include "kernels/kernels.h"
#include "kernels/norm/norm_row.cuh"

namespace ftbert {
namespace {

// offset: added to gamma by the rules that do. x, input, sum and out carry no __restrict__: out and sum may alias x or
// input. Copy: nothing, or E4m3Rows or ByteRows, and then out may be null.
template <class Shape, class E, class Rule, class... Copy>
__global__ void __launch_bounds__(Shape::kMaxThreads)
    add_bias_input_layernorm_kernel(const E* x, const E* bias, const E* input, const E* gamma, const E* beta, float eps,
                                    int64_t rows, int cols, E* sum, E* out, float offset, Copy... copy) {
  constexpr bool kNormalize = !std::is_same_v<Rule, NoRule>;
  const Rule rule{eps, offset};
  wait_for_inputs();
  (copy.read_scale(), ...);
  RowWalk<Shape> walk;
  if constexpr (Shape::kPacks > 0) {
    // The vectors stay in registers for all rows of this group.
    Packed<E, Shape::kWidth> b[Shape::kPacks], g[Shape::kPacks], h[Shape::kPacks];
    load_row<Shape>(bias, cols, walk.lane, b);
    load_row<Shape>(gamma, cols, walk.lane, g);
    load_row<Shape>(beta, cols, walk.lane, h);
    for (; walk.row < rows; walk.row += walk.step) {
      const int64_t at = walk.row * cols;
      (copy.begin_row(walk.row), ...);
      Packed<E, Shape::kWidth> a[Shape::kPacks], c[Shape::kPacks];
      load_row<Shape>(x + at, cols, walk.lane, a);
      load_row<Shape>(input ? input + at : nullptr, cols, walk.lane, c);
      const auto first = [&](int i, float (&of_x)[Shape::kWidth]) { a[i].to_floats(of_x); };
      norm_packs<Shape>(first, b, c, g, h, kNormalize, rule, cols, walk.lane, sum ? sum + at : nullptr, out, at,
                        copy...);
    }
  } else {
    for (; walk.row < rows; walk.row += walk.step) {
      const int64_t at = walk.row * cols;
      (copy.begin_row(walk.row), ...);
      norm_row<Shape>(x + at, bias, input ? input + at : nullptr, kNormalize ? gamma : nullptr, beta, rule, cols,
                      walk.lane, sum ? sum + at : nullptr, out, at, copy...);
    }
  }
}

}  // namespace

template <class Device, class T>
void add_bias_input_layernorm(Context<Device>& context, const T* x, const T* bias, const T* input, const Norm<T>& norm,
                              int64_t rows, int64_t cols, const Output<T>& to) {
  if (rows == 0 || cols == 0) return;
  const Operand copy = to.copy.scaled() ? to.copy : Operand();
  T *const sum = to.sum, *const out = copy ? to.normed : to.only_norm();
  FTBERT_CHECK(cols < (1 << 30), "add_bias_input_layernorm: a row has at most 2^30 elements, got ", cols);
  const auto launch = [&]<class Shape, class Rule, class... Copy>(const Copy&... beside) {
    const auto kernel = add_bias_input_layernorm_kernel<Shape, native_t<T>, Rule, Copy...>;
    // No more blocks than there is room for at once: each walks over rows, its vectors loaded once.
    static std::array<std::atomic<int>, 64> known{};  // by device; 0: not asked yet
    const size_t device = static_cast<size_t>(context.device);
    int fitting = device < known.size() ? known[device].load(std::memory_order_relaxed) : 0;
    if (fitting == 0) {
      FTBERT_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fitting, kernel, Shape::kMaxThreads, 0));
      if (device < known.size()) known[device].store(fitting, std::memory_order_relaxed);
    }
    RowLaunch on = row_launch<Shape>(rows, context.sm_count);
    on.blocks = std::min(on.blocks, static_cast<unsigned>(fitting * context.sm_count));
    launch_overlapped(context, "kernel add_bias_input_layernorm", kernel, on.blocks, on.threads, 0, 1, native(x),
                      native(bias), native(input), native(norm.gamma), native(norm.beta), norm.eps, rows, cols,
                      native(sum), native(out), norm.offset, beside...);
  };
  const bool wide = vectorizable(kWidth<T>, cols, x, bias, input, norm.gamma, norm.beta, sum, out) && is_wide(copy);
  with_copy<T>(copy, cols, [&](const auto&... beside) {
    with_row_shape<kWidth<T>>(wide, cols, [&](auto shape) {
      with_norm_rule(norm, [&]<class Rule>() { launch.template operator()<decltype(shape), Rule>(beside...); });
    });
  });
}

FTBERT_INSTANTIATE_CUDA(add_bias_input_layernorm, Cuda)

}  // namespace ftbert
