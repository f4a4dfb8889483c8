// Which storage types of weights are computed: the one place that knows.
#include "core/check.h"
#include "gemm/gemm.h"

namespace ftbert {

template <class T>
void check_product_exists(DeviceKind device, const Linear<T>& linear) {
  const Matrix& weight = linear.weight;
  constexpr DType kStream = kDType<T>;
  const bool cpu = device == DeviceKind::cpu;
  const bool exists = cpu ? kStream == DType::fp32 && (weight.dtype == DType::fp32 || weight.dtype == DType::bf16)
                          : weight.dtype == kStream;
  FTBERT_CHECK(exists, "no product on ", cpu ? "cpu" : "cuda", " multiplies ", to_string(kStream),
               " by a matrix stored as ", to_string(weight.dtype), "; expected ",
               cpu ? "matrices in fp32 or bf16 beside fp32" : "matrices of the same type, fp32, fp16 or bf16");
  FTBERT_CHECK(weight.per == Granularity::none && !linear.input, "no product on ", cpu ? "cpu" : "cuda",
               " reads the scales of a matrix in ", to_string(weight.dtype), " or of its other operand");
}

template void check_product_exists(DeviceKind, const Linear<float>&);
template void check_product_exists(DeviceKind, const Linear<half_t>&);
template void check_product_exists(DeviceKind, const Linear<bfloat16_t>&);

}  // namespace ftbert
