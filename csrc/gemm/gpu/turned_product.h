// The product of queries, keys and values whose heads are normed and turned (kernels.h: rotary) before they are stored
// in 16 bits. No CUDA header.
#pragma once
#include <climits>
#include <cstdint>

#include "gemm/gpu/own.h"
#include "kernels/kernels.h"

namespace ftbert {

// Heads as Epilogue::heads says them; none where no kernel knows these rules.
template <class T>
HeadColumns head_columns(const Heads& heads, const HeadRules<T>& rules) {
  const Rotation& r = rules.rotation;
  const Norm<T>&q = rules.q_norm, &k = rules.k_norm;
  const auto aligned = [](int bytes, const auto*... all) {
    return ((reinterpret_cast<uintptr_t>(all) % bytes == 0) && ...);
  };
  const bool turned = !r || (r.dims % 8 == 0 && aligned(16, r.table) && r.positions * r.dims <= INT_MAX);
  if (!turned || !aligned(4 * sizeof(T), q.gamma, q.beta, k.gamma, k.beta)) return {};
  const bool whole = r && r.dims == heads.size && !r.interleaved && q.kind == k.kind && q.rounding == k.rounding &&
                     q.kind != NormKind::layer && !q.beta && !k.beta;
  return {heads.size, heads.width() + heads.kv_width(), whole};
}

// Whether tiles of so many columns hold whole heads of a size that is compiled.
constexpr bool holds_heads(const HeadColumns& heads, int tile_columns) {
  return (heads.size == 64 || heads.size == 128) && tile_columns % heads.size == 0;
}

}  // namespace ftbert
