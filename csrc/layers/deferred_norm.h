// Norms without kernels, for up to some 1000 tokens: the products on both sides of a norm do its work
// (gemm/gpu/deferred_norm.h). Hopper alone, 16-bit elements, a LayerNorm after each residual sum or any norm before
// each block. No CUDA header.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "core/context.h"
#include "core/norm.h"
#include "core/workspace.h"
#include "layers/buffers.h"
#include "model/weights.h"

namespace ftbert {

// Up to how many tokens norms are deferred, from which on norm kernels are faster. $FTBERT_DEFERRED_NORM: "off" (0),
// "on", or another number; Error for other words. Of a build with CUDA.
int64_t most_deferred_tokens();

// The residual stream of one call while norms are pending on it. Its products are asked for in the order of the layers.
template <class Device, class T>
class DeferredCall {
 public:
  virtual ~DeferredCall() = default;
  // A block's first product, of all rows: out = activation(norm(stream) @ linear^T + bias), with a gate where the
  // model's feed-forward layers have one.
  virtual Operand project(Context<Device>& context, const Linear<T>& linear, Activation activation,
                          const Operand& out) = 0;
  // A block's last product: stream = stream + a @ linear^T + bias, on which one of the norms is pending: `after` of the
  // stream, or `before_next` of what the next block reads (layers/residual.h).
  virtual void add(Context<Device>& context, const Linear<T>& linear, const Operand& a, const Norm<T>& after,
                   const Norm<T>& before_next) = 0;
  // x [tokens, hidden] and what the next block reads, as if no norm had been deferred.
  virtual void settle(Context<Device>& context, int64_t tokens, T* x) = 0;
};

// Starts such calls for one model. Immutable: any number of threads may ask it.
template <class Device, class T>
class DeferredNorm {
 public:
  virtual ~DeferredNorm() = default;
  // Takes what a call needs of its workspace beside carve_layer_buffers.
  virtual void carve(Workspace& workspace, int64_t tokens, LayerBuffers<T>& b) const = 0;
  // The model's first `layers` layers over x [tokens, hidden]; not to outlive this. nullptr where the plans choose
  // another kernel than wgmma_tile for one of a layer's four products.
  virtual std::unique_ptr<DeferredCall<Device, T>> start(const Context<Device>& context, int64_t tokens, int64_t layers,
                                                         const LayerBuffers<T>& b, T* x) const = 0;
  // For people, the numbers of tokens that it takes: "1 to 320, 385 to 512", or "".
  virtual std::string sizes(const Context<Device>& context) const = 0;
};

template <class Device, class T>
struct DeferredNormChoice {
  std::shared_ptr<const DeferredNorm<Device, T>> maker;   // nullptr: norms are kernels, or parts of one product
  std::string refusal = "only 16-bit elements on a GPU";  // why there is none
};

// Vectors made of gammas, betas and biases are written to allocated memory: a changed weight makes them stale. weights
// must outlive the maker.
template <class Device, class T>
DeferredNormChoice<Device, T> make_deferred_norm(const Context<Device>&, const EncoderConfig&, const Weights<T>&,
                                                 AttentionPath, const AllocateFloats&) {
  return {};
}
template <class T>
DeferredNormChoice<Cuda, T> make_deferred_norm(const Context<Cuda>& context, const EncoderConfig& config,
                                               const Weights<T>& weights, AttentionPath path,
                                               const AllocateFloats& allocate);

}  // namespace ftbert
