// A call of up to eight tokens with a cache, a step of generation: every norm that comes before a block belongs to the
// block's first product, and every sum to its last (gemm/hopper/few_rows.h). Hopper alone, 16-bit elements, weights in
// them or in Q8_0. No CUDA header.
#pragma once
#include <memory>

#include "layers/deferred_norm.h"

namespace ftbert {

// nullptr where a layer has other norms or weights, and with FTBERT_DEFERRED_NORM=off. config and weights must outlive
// it.
template <class Device, class T>
std::shared_ptr<const DeferredNorm<Device, T>> make_few_rows(const Context<Device>&, const EncoderConfig&,
                                                             const Weights<T>&, AttentionPath) {
  return nullptr;
}
template <class T>
std::shared_ptr<const DeferredNorm<Cuda, T>> make_few_rows(const Context<Cuda>& context, const EncoderConfig& config,
                                                           const Weights<T>& weights, AttentionPath path);

}  // namespace ftbert
