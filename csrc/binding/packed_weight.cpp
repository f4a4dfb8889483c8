#include "binding/packed_weight.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>

#include "binding/team.h"
#include "binding/tensors.h"
#include "binding/torch_products.h"
#include "gemm/cpu/kernel.h"

namespace ftbert::binding {
namespace {

// Of one row of floats or bytes; nullptr where this CPU has none.
const WeightLayout* packed_layout(const at::Tensor& packed) {
  const CpuKernel* const kernel = kernel_for(packed.scalar_type() == at::kByte ? formats::int8 : formats::fp32);
  return kernel ? kernel->layout : nullptr;
}

// As core/format.h says of int8 on a GPU.
at::Tensor pack_int8(const at::Tensor& weight) {
  const int64_t k = weight.size(1);
  const at::Tensor rows = at::constant_pad_nd(weight, {0, int8_row_bytes(k) - k});
  const at::Tensor sums = weight.sum(1, /*keepdim=*/false, at::kInt);
  return at::cat({rows.view(-1).view(at::kByte), sums.view(at::kByte)});
}

}  // namespace

bool is_packed_on(const at::Device& device, const Format& format) {
  return device.is_cpu() || &format == &formats::int8;
}

at::Tensor pack_weight(const at::Tensor& weight) {
  const at::Tensor plain = weight.detach().contiguous();
  const Format& format = stored_format(plain.scalar_type());
  if (!plain.is_cpu()) {
    FTBERT_CHECK(is_packed_on(plain.device(), format), "a weight in ", format.name, " is packed on the CPU alone");
    return pack_int8(plain);
  }
  const Team team;
  check_format_exists(DeviceKind::cpu, {}, DType::fp32, format);
  const CpuKernel& kernel = *kernel_for(format);
  if (&kernel == &onednn_kernel) return pack_for_onednn(plain);
  const int64_t n = plain.size(0), k = plain.size(1);
  const auto [type, size] = &format == &formats::fp32 ? std::pair(at::kFloat, 4) : std::pair(at::kByte, 1);
  at::Tensor packed = at::empty({kernel.layout->bytes(n, k) / size}, plain.options().dtype(type));
  kernel.layout->pack(plain.const_data_ptr(), nullptr, n, k, packed.mutable_data_ptr());
  return packed;
}

at::Tensor unpack_weight(const at::Tensor& packed, at::IntArrayRef shape) {
  if (!packed.is_cpu()) {
    const int64_t n = shape[0], k = shape[1], row = int8_row_bytes(k);
    return packed.narrow(0, 0, n * row).view(at::kChar).view({n, row}).narrow(1, 0, k).contiguous();
  }
  const Team team;
  if (packed.is_mkldnn()) return packed.to_dense();
  const at::ScalarType type = packed.scalar_type() == at::kByte ? at::kChar : at::kFloat;
  at::Tensor weight = at::empty(shape, packed.options().dtype(type));
  packed_layout(packed)->unpack(packed.const_data_ptr(), shape[0], shape[1], weight.mutable_data_ptr(), nullptr);
  return weight;
}

bool is_packed(const at::Tensor& matrix) { return matrix.is_mkldnn() || matrix.dim() == 1; }

bool has_shape(const at::Tensor& weight, at::IntArrayRef shape) {
  if (weight.dim() != 1 || shape.size() != 2) return weight.sizes() == shape;
  if (!weight.is_cpu())
    return weight.scalar_type() == at::kByte && weight.numel() == int8_gpu_bytes(shape[0], shape[1]);
  const WeightLayout* const layout = packed_layout(weight);
  return layout && static_cast<int64_t>(weight.nbytes()) == layout->bytes(shape[0], shape[1]);
}

Matrix weight_matrix(const Format& format, const at::Tensor& weight, int64_t n, int64_t k) {
  Matrix matrix{.data = &weight, .format = &format, .kernel = &onednn_kernel, .n = n, .k = k};
  if (weight.is_mkldnn()) return matrix;
  matrix.data = weight.const_data_ptr();
  matrix.kernel = weight.is_cpu() ? kernel_for(format) : nullptr;
  return matrix;
}

}  // namespace ftbert::binding
