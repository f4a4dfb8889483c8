// Which storage types of a weight the products of each device compute.
#include "core/check.h"
#include "gemm/gemm.h"

namespace ftbert {

void check_computed(DeviceKind device, DType stream, const Matrix& weight) {
  const DType stored = weight.dtype;
  if (device == DeviceKind::cpu) {
    if (stream == DType::fp32 && (stored == DType::fp32 || stored == DType::bf16)) return;
    fail("no product on the CPU multiplies ", to_string(stream), " by a matrix stored as ", to_string(stored),
         "; store the weights as fp32 or bf16, and load the model with dtype='fp32' or 'bf16'");
  }
  const bool computes = stream == DType::fp32 || stream == DType::fp16 || stream == DType::bf16;
  if (computes && stored == stream) return;
  fail("no product on the GPU multiplies ", to_string(stream), " by a matrix stored as ", to_string(stored),
       "; store the weights as fp32, fp16 or bf16 and load the model with that dtype");
}

}  // namespace ftbert
