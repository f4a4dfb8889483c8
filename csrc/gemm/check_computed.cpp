// Which storage types of weights are computed: the one place that knows.
#include "core/check.h"
#include "gemm/gemm.h"

namespace ftbert {

void check_computed(DeviceKind device, DType stream, const Matrix& weight) {
  const bool cpu = device == DeviceKind::cpu;
  const bool computed =
      cpu ? stream == DType::fp32 && (weight.dtype == DType::fp32 || weight.dtype == DType::bf16)
          : weight.dtype == stream && (stream == DType::fp32 || stream == DType::fp16 || stream == DType::bf16);
  FTBERT_CHECK(computed, "no product on ", cpu ? "cpu" : "cuda", " multiplies ", to_string(stream),
               " by a matrix stored as ", to_string(weight.dtype), "; expected ",
               cpu ? "matrices in fp32 or bf16 beside fp32" : "matrices of the same type, fp32, fp16 or bf16");
}

}  // namespace ftbert
