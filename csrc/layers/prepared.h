// What is made of a model's weights at load: the tables of rotary positions, those of scores by position; and for
// 16-bit elements what products need to do the work of the norms between them, and for which calls they do it. No CUDA
// header.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/context.h"
#include "layers/buffers.h"
#include "model/weights.h"

namespace ftbert {

// weights with the rotation of each layer, one table of config.max_positions rows for each distinct Rotary; of one
// whose tables batches bring (Batch::angles), a row.
template <class Device, class T>
Weights<T> with_rotary_tables(const Context<Device>& context, const ModelConfig& config, Weights<T> weights,
                              const AllocateFloats& allocate);

// weights with PositionProducts of each layer: the table of positions behind its norm and the layer's projections.
template <class Device, class T>
Weights<T> with_position_products(const Context<Device>& context, const ModelConfig& config, Weights<T> weights,
                                  const AllocateFloats& allocate);

// Up to how many tokens of a call the norms of a model are deferred; 0: never. $FTBERT_DEFERRED_NORM, read when a model
// is prepared: "off" (0), "on", or another number; Error for other words.
struct DeferralLimits {
  int64_t by_reader = 0;      // with a cache: where each layer has norms before its blocks alone
  int64_t by_moments = 0;     // where each has LayerNorms with a beta behind its sums, or norms before its blocks
  std::vector<bool> pays;     // by moments, by gemm_rows; empty: $FTBERT_DEFERRED_NORM asks for it, paying or not
  std::vector<size_t> kinds;  // by moments: a layer for each way in which the matrices of one are stored
  std::string refusal = "only 16-bit elements on a GPU";  // why there are none by moments
};

// Sets the vectors of the weights' Linears in memory that is allocated: a changed weight makes them stale. Without
// `allocate` there are none.
template <class Device, class T>
DeferralLimits prepare(const Context<Device>&, const ModelConfig&, Weights<T>&, AttentionPath, const AllocateFloats&) {
  return {};
}
template <class T>
DeferralLimits prepare(const Context<Cuda>& context, const ModelConfig& config, Weights<T>& weights, AttentionPath path,
                       const AllocateFloats& allocate);

// Who norms the rows of a call of so many tokens: the same at all edges of its layers, since no mixture was measured.
// By moments where plans choose kernels that do so for all four products of each kind of layer, and that pays
// (gemm/gpu/own.h).
template <class Device, class T>
NormedBy normed_by(const Context<Device>&, const DeferralLimits&, const Weights<T>&, int64_t, bool) {
  return NormedBy::kernels;
}
template <class T>
NormedBy normed_by(const Context<Cuda>& context, const DeferralLimits& limits, const Weights<T>& weights,
                   int64_t tokens, bool cached);

// For people, the numbers of tokens whose norms are deferred by moments: "of 1 to 320, 385 to 512 tokens"; or "no: ",
// and why.
template <class Device, class T>
std::string deferred_state(const Context<Device>&, const DeferralLimits& limits, const Weights<T>&) {
  return "no: " + limits.refusal;
}
template <class T>
std::string deferred_state(const Context<Cuda>& context, const DeferralLimits& limits, const Weights<T>& weights);

}  // namespace ftbert
