// torch.ops.ftbert.*: q8_0 and Q8_1 by themselves.
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>

#include "binding/define_op.h"
#include "binding/q8_0.h"
#include "core/format.h"
#include "test_checks.h"

#define FTBERT_ISA of_this_op
#include "kernels/elementwise/q8_1_row.h"
#undef FTBERT_ISA

namespace ftbert::binding {
namespace {

// x [rows, k] -> int8 [rows, k], scales float [rows, k / 32], as the CPU's products with matrices in q8_0 make them.
std::tuple<Tensor, Tensor> quantize_q8_1(const Tensor& x) {
  elements("x", x, 2);
  FTBERT_CHECK(x.is_cpu(), "x: expected it on the CPU, got ", describe(x));
  FTBERT_CHECK(x.size(1) % kQ8Block == 0, "x: expected [rows, k], k a multiple of ", kQ8Block, ", got ", describe(x));
  const Tensor numbers = at::empty(x.sizes(), x.options().dtype(at::kChar));
  const Tensor scales = at::empty({x.size(0), x.size(1) / kQ8Block}, x.options());
  for (int64_t i = 0; i < scales.numel(); ++i)
    of_this_op::store_q8_1_block(data<float>(x) + i * kQ8Block, data<int8_t>(numbers) + i * kQ8Block,
                                 data<float>(scales) + i);
  return {numbers, scales};
}

// -> [n, k], each number times its scale in float, rounded to dtype
Tensor dequantize_q8_0(const Tensor& values, const Tensor& scales, at::ScalarType dtype) {
  check_q8_0(values, scales);
  FTBERT_CHECK(is_element(dtype), "dtype: expected float32, float16 or bfloat16, got ", at::toString(dtype));
  const int64_t n = values.size(0), k = values.size(1);
  const Tensor numbers = values.reshape({n, k / kQ8Block, kQ8Block}).to(at::kFloat);
  return at::mul(numbers, scales.to(at::kFloat).unsqueeze(2)).view({n, k}).to(dtype);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ftbert, m) {
  define_op(m, "quantize_q8_1(Tensor x) -> (Tensor, Tensor)", &quantize_q8_1);
  define_op(m, "dequantize_q8_0(Tensor values, Tensor scales, ScalarType dtype) -> Tensor", &dequantize_q8_0);
}

}  // namespace ftbert::binding
