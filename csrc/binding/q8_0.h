// Matrices in q8_0 (core/format.h) as torch holds them: plain, and as the products of a device read them.
#pragma once
#include <ATen/core/Tensor.h>

#include <utility>

#include "binding/visible.h"

namespace ftbert::binding {

// values int8 [n, k], k a multiple of 32, and scales fp16 [n, k / 32] on one device; an error calls them so.
FTBERT_VISIBLE void check_q8_0(const at::Tensor& values, const at::Tensor& scales, const char* values_name = "values",
                               const char* scales_name = "scales");

// values int8 [n, k], scales fp16 [n, k / 32] -> uint8 [bytes], on their device: panels on the CPU, tiles on a GPU.
// Error where n is no multiple of 8, or k of 64.
FTBERT_VISIBLE at::Tensor pack_q8_0(const at::Tensor& values, const at::Tensor& scales);
// And back: values, scales.
std::pair<at::Tensor, at::Tensor> unpack_q8_0(const at::Tensor& packed, at::IntArrayRef shape);
bool is_packed_q8_0(const at::Tensor& tensor, at::IntArrayRef shape);  // of a matrix of that shape

}  // namespace ftbert::binding
