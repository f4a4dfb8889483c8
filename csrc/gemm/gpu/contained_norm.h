// What callers of a product that contains the residual sum and the norm behind it must provide (After::norm and
// norm_beside; wgmma_layernorm, wgmma_prenorm in own.h). No CUDA header.
//
// norm: c [m, n] = norm(a [m, k] @ b [n, k]^T + bias + c), rounded once, at the end.
// norm_beside: c = a @ b^T + bias + c and copy [m, n] = norm of that before it was rounded.
//
// With a and b in E4M3 both multiply the sums by the scales first, and may store the norm in E4M3 with a scale, rounded
// once, from float: norm_beside instead of 16 bits, norm beside c, at copy.
//
// A row is at most kMostNormTiles tiles. Parts of c are read before the kernel ahead has ended, unless Context::overlap
// is off: like weights, c must be there before that one begins to work. In a model c is the stream, which embeddings,
// gather_rows or a block's end wrote. Directly ahead runs the other part of a block: attention, a feed-forward's first
// product or its gate, or gather_rows of attention's result. None writes the stream. The copy is written when the
// kernel ahead, which may read it, has ended.
#pragma once
#include <cstdint>

#include "gemm/product.h"

namespace ftbert {

inline constexpr int64_t kMostNormTiles = 8;  // side by side

// Words of ProductData::moments, through which blocks exchange their rows' moments. Products of one stream may share
// them if nobody else writes there and their turns are 0, 1, 2, ... in the order in which they run.
constexpr int64_t exchanged_moment_count(int64_t m) { return rows_in_tiles(m) * kMostNormTiles; }

}  // namespace ftbert
