#include "binding/q8_0.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "binding/team.h"
#include "binding/tensors.h"
#include "core/check.h"
#include "core/format.h"
#include "gemm/cpu/kernel.h"

namespace ftbert::binding {
namespace {

// From and to [n / 8, g 8, k / 64, h 2, j 2, t 4, b 4] of numbers, [n / 8, g 8, k / 64, h 2] of scales.
at::Tensor tiles_of(const at::Tensor& values, const at::Tensor& scales) {
  const int64_t rows = values.size(0) / kQ8TileRows, steps = values.size(1) / kQ8TileDepth;
  const at::Tensor numbers = values.view({rows, 8, steps, 2, 2, 4, 4}).permute({0, 2, 1, 5, 3, 4, 6});
  const at::Tensor factors = scales.view({rows, 8, steps, 2}).permute({0, 2, 3, 1});
  return at::cat({numbers.reshape(-1).view(at::kByte), factors.reshape(-1).view(at::kByte)});
}

std::pair<at::Tensor, at::Tensor> matrix_of(const at::Tensor& tiles, int64_t n, int64_t k) {
  const int64_t rows = n / kQ8TileRows, steps = k / kQ8TileDepth;
  const at::Tensor numbers = tiles.narrow(0, 0, n * k).view(at::kChar).view({rows, steps, 8, 4, 2, 2, 4});
  const at::Tensor factors = tiles.narrow(0, n * k, tiles.numel() - n * k).view(at::kHalf).view({rows, steps, 2, 8});
  return {numbers.permute({0, 2, 1, 4, 5, 3, 6}).reshape({n, k}),
          factors.permute({0, 3, 1, 2}).reshape({n, k / kQ8Block})};
}

}  // namespace

void check_q8_0(const at::Tensor& values, const at::Tensor& scales, const char* values_name, const char* scales_name) {
  plain(values_name, values);
  plain(scales_name, scales);
  FTBERT_CHECK(
      values.dim() == 2 && values.numel() > 0 && values.scalar_type() == at::kChar && values.size(1) % kQ8Block == 0,
      values_name, ": expected int8 [n, k], k a multiple of ", kQ8Block, ", got ", describe(values));
  FTBERT_CHECK(scales.sizes() == at::IntArrayRef({values.size(0), values.size(1) / kQ8Block}) &&
                   scales.scalar_type() == at::kHalf && scales.device() == values.device(),
               scales_name, ": expected float16 [n, k / ", kQ8Block, "] beside ", values_name, " ", describe(values),
               ", got ", describe(scales));
}

at::Tensor pack_q8_0(const at::Tensor& values, const at::Tensor& scales) {
  const int64_t n = values.size(0), k = values.size(1);
  FTBERT_CHECK(n % kQ8TileRows == 0 && k % kQ8TileDepth == 0, "q8_0: expected rows in multiples of ", kQ8TileRows,
               " and columns of ", kQ8TileDepth, ", got [", n, ", ", k, "]");
  const at::Tensor numbers = values.detach().contiguous(), factors = scales.detach().contiguous();
  if (!numbers.is_cpu()) return tiles_of(numbers, factors);
  const Team team;
  const WeightLayout& layout = *q8_0_panels.layout;
  at::Tensor panels = at::empty({layout.bytes(n, k)}, numbers.options().dtype(at::kByte));
  layout.pack(numbers.const_data_ptr(), static_cast<const half_t*>(factors.const_data_ptr()), n, k,
              panels.mutable_data_ptr());
  return panels;
}

std::pair<at::Tensor, at::Tensor> unpack_q8_0(const at::Tensor& packed, at::IntArrayRef shape) {
  const int64_t n = shape[0], k = shape[1];
  if (!packed.is_cpu()) return matrix_of(packed, n, k);
  const Team team;
  at::Tensor values = at::empty({n, k}, packed.options().dtype(at::kChar));
  at::Tensor scales = at::empty({n, k / kQ8Block}, packed.options().dtype(at::kHalf));
  q8_0_panels.layout->unpack(packed.const_data_ptr(), n, k, values.mutable_data_ptr(),
                             static_cast<half_t*>(scales.mutable_data_ptr()));
  return {values, scales};
}

bool is_packed_q8_0(const at::Tensor& tensor, at::IntArrayRef shape) {
  if (tensor.scalar_type() != at::kByte || tensor.dim() != 1 || shape.size() != 2) return false;
  const int64_t n = shape[0], k = shape[1];
  return tensor.numel() == (tensor.is_cpu() ? q8_0_panels.layout->bytes(n, k) : formats::q8_0.bytes(n, k));
}

}  // namespace ftbert::binding
