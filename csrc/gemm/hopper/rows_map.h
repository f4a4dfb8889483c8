// A product's operand A as the tensor memory accelerator reads it.
#pragma once
#include "device/tensor_map.h"
#include "gemm/gpu/own.h"

namespace ftbert {

// In boxes of so many rows. The accelerator takes two or three times as long for a row beyond the edge as for one that
// it reads, so the edge is where the last tile of kReadRows ends: only larger boxes reach over it.
inline CUtensorMap rows_map(const Product& p, const ProductData& data, int box_rows) {
  return tensor_map(data.a, p.a, rows_in_tiles(p.m), p.k, box_rows);
}

}  // namespace ftbert
