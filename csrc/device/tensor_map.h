// What the tensor memory accelerator wants to know of a matrix.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/check.h"
#include "core/cuda_check.h"
#include "core/types.h"

namespace ftbert {

inline auto tensor_map_encoder() {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    FTBERT_CUDA_CHECK(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
    FTBERT_CHECK(found && result == cudaDriverEntryPointSuccess, "this driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  return encode;
}

// A matrix [rows, columns] of 8- or 16-bit elements at an address of 16 bytes' alignment, read in boxes whose rows have
// 128 or 64 bytes, laid out with the swizzle of that name. Zeros beyond the edges. box_columns: 0 are 128 bytes.
// stride: from a row to the next, in elements, a multiple of 16 bytes; 0: columns.
inline CUtensorMap tensor_map(const void* data, DType dtype, int64_t rows, int64_t columns, int box_rows,
                              int box_columns = 0, int64_t stride = 0) {
  // The innermost dimension first; the stride, in bytes, is the other's.
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const int64_t size = bytes_of(dtype);
  if (box_columns == 0) box_columns = static_cast<int>(128 / size);
  const auto bytes = static_cast<cuuint64_t>(size * (stride > 0 ? stride : columns));
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)}, steps[] = {1, 1};
  const auto type = size == 1              ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                    : dtype == DType::fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                           : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto swizzle = size * box_columns == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  CUtensorMap map;
  const CUresult result = tensor_map_encoder()(&map, type, 2, const_cast<void*>(data), sizes, &bytes, box, steps,
                                               CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  FTBERT_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with ", static_cast<int>(result), " for ", rows,
               " rows");
  return map;
}

// Pieces [count, steps] of `bytes` each, a multiple of 16 up to 2048, one behind the other, read in boxes of one step
// of box_count of them; as they are, zeros beyond the last.
inline CUtensorMap pieces_map(const void* data, int64_t count, int64_t steps, int64_t bytes, int box_count) {
  const auto size = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  const cuuint64_t sizes[] = {size(bytes / 8), size(steps), size(count)},
                   strides[] = {size(bytes), size(steps * bytes)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(bytes / 8), 1, static_cast<cuuint32_t>(box_count)};
  const cuuint32_t apart[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT64, 3, const_cast<void*>(data), sizes, strides, box,
                           apart, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  FTBERT_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with ", static_cast<int>(result), " for ", count,
               " pieces of ", bytes, " bytes");
  return map;
}

}  // namespace ftbert
