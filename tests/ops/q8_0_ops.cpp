// torch.ops.ftbert.*: q8_0 and Q8_1 by themselves.
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>

#include "binding/define_op.h"
#include "binding/q8_0.h"
#include "core/format.h"
#include "kernels/elementwise/quantise_q8_1.h"
#include "test_checks.h"

namespace ftbert::binding {
namespace {

// x [rows, k] -> int8 [rows, k], scales float [rows, k / 32]
std::tuple<Tensor, Tensor> quantize_q8_1(const Tensor& x) {
  elements("x", x, 2);
  FTBERT_CHECK(x.size(1) % kQ8Block == 0, "x: expected [rows, k], k a multiple of ", kQ8Block, ", got ", describe(x));
  const int64_t rows = x.size(0), cols = x.size(1);
  const Tensor numbers = at::empty({rows, cols}, x.options().dtype(at::kChar));
  const Tensor scales = at::empty({rows, cols / kQ8Block}, x.options().dtype(at::kFloat));
  run(x, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    quantise_q8_1(call.context, data<T>(x), rows, cols, data<int8_t>(numbers), data<float>(scales));
  });
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
