// What the tensor memory accelerator wants to know of a matrix.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/check.h"
#include "core/cuda_check.h"
#include "core/types.h"

namespace ftbert {

// The innermost dimension first; `strides` in bytes, of the others. Zeros beyond the edges.
template <int kRank>
CUtensorMap encode_map(const void* data, DType dtype, const cuuint64_t (&sizes)[kRank],
                       const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank]) {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    FTBERT_CUDA_CHECK(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
    FTBERT_CHECK(found && result == cudaDriverEntryPointSuccess, "this driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  CUtensorMap map;
  cuuint32_t steps[kRank];
  for (cuuint32_t& step : steps) step = 1;
  const auto type = dtype == DType::fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result =
      encode(&map, type, kRank, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             box[0] == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  FTBERT_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with ", static_cast<int>(result), " for ",
               sizes[1], " rows");
  return map;
}

// A matrix [rows, columns] of 16-bit elements at an address of 16 bytes' alignment, read in boxes of [box_rows, 64]
// laid out with the 128-byte swizzle, or of [box_rows, 32] with that of 64 bytes.
inline CUtensorMap tensor_map(const void* data, DType dtype, int64_t rows, int64_t columns, int box_rows,
                              int box_columns = 64) {
  return encode_map<2>(data, dtype, {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)},
                       {static_cast<cuuint64_t>(columns) * 2},
                       {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)});
}

}  // namespace ftbert
