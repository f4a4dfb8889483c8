// Which storage types of weights are computed: the one place that knows.
#include "core/check.h"
#include "gemm/gemm.h"

namespace ftbert {

void check_product_exists(DeviceKind device, DType stream, const Matrix& weight,
                          const std::optional<InputScale>& input) {
  const bool cpu = device == DeviceKind::cpu;
  const bool exists =
      cpu ? stream == DType::fp32 && (weight.dtype == DType::fp32 || weight.dtype == DType::bf16)
          : weight.dtype == stream && (stream == DType::fp32 || stream == DType::fp16 || stream == DType::bf16);
  FTBERT_CHECK(exists, "no product on ", cpu ? "cpu" : "cuda", " multiplies ", to_string(stream),
               " by a matrix stored as ", to_string(weight.dtype), "; expected ",
               cpu ? "matrices in fp32 or bf16 beside fp32" : "matrices of the same type, fp32, fp16 or bf16");
  FTBERT_CHECK(weight.per == Granularity::none && !input, "no product on ", cpu ? "cpu" : "cuda",
               " reads the scales of a matrix in ", to_string(weight.dtype), " or of its other operand");
}

}  // namespace ftbert
