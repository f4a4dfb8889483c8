// Weights [n, k] of products as torch holds them: rows, or packed in the layout of their kernel. Packed they are a
// tensor of oneDNN's, or one row of floats or bytes. Of q8_0 see q8_0.h.
#pragma once
#include <ATen/core/Tensor.h>

#include "binding/visible.h"
#include "gemm/product.h"

namespace ftbert::binding {

// Whether products on this device read it packed: on the CPU all, on a GPU int8.
bool is_packed_on(const at::Device& device, const Format& format);
// weight [n, k], fp32, bf16 or int8, on a GPU int8 -> packed; Error where nothing on the CPU multiplies by it.
FTBERT_VISIBLE at::Tensor pack_weight(const at::Tensor& weight);
at::Tensor unpack_weight(const at::Tensor& packed, at::IntArrayRef shape);  // [n, k]
bool is_packed(const at::Tensor& matrix);
bool has_shape(const at::Tensor& weight, at::IntArrayRef shape);  // packed or not

// As a product on its device reads it, without its scales: packed on the CPU. weight outlives it.
FTBERT_VISIBLE Matrix weight_matrix(const Format& format, const at::Tensor& weight, int64_t n, int64_t k);

}  // namespace ftbert::binding
