// What callers of wgmma_layernorm (own.h) must provide: the product before a residual LayerNorm and that LayerNorm in
// one kernel, on Hopper. No CUDA header.
//
// c [m, n] = LayerNorm(a [m, k] @ b [n, k]^T + bias + c) * gamma + beta, rounded once, at the end. A row is at most
// kMostNormTiles tiles. Parts of c are read before the kernel ahead has ended, unless Context::overlap is off: like
// weights, c must be there before that one begins to work.
#pragma once
#include <cstdint>

namespace ftbert {

inline constexpr int64_t kMostNormTiles = 8;  // side by side

// Words of ProductData::moments, through which blocks exchange their rows' moments. Products of one stream may share
// them if nobody else writes there and their turns are 0, 1, 2, ... in the order in which they run.
constexpr int64_t exchanged_moment_count(int64_t m) { return (m + 127) / 128 * 128 * kMostNormTiles; }

}  // namespace ftbert
