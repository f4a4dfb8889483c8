// The layers of a post-LayerNorm encoder without LayerNorm kernels, for up to some 1000 tokens: the products on both
// sides of a LayerNorm do its work (gemm/own/deferred_norm.h). Hopper alone, 16-bit elements. No CUDA header.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "layers/layer_stack.h"

namespace ftbert {

// Makes the stacks of one model. Immutable: any number of threads may ask it.
template <class Device, class T>
class DeferredNorm {
 public:
  virtual ~DeferredNorm() = default;
  // Takes what a stack needs of the call's workspace beside carve_layer_buffers.
  virtual void carve(Workspace& workspace, int64_t tokens, LayerBuffers<T>& b) const = 0;
  // The stack for so many tokens; it must not outlive this. nullptr where one of a layer's four products is not of the
  // kernel that can defer a LayerNorm: a product that the tuner found faster is not given up for this.
  virtual std::unique_ptr<const Stack<Device, T>> stack_for(const Context<Device>& context, int64_t tokens) const = 0;
  // For people, the numbers of tokens that it takes: "1 to 320, 385 to 512", or "".
  virtual std::string sizes(const Context<Device>& context) const = 0;
};

template <class Device, class T>
struct DeferredNormChoice {
  std::shared_ptr<const DeferredNorm<Device, T>> maker;   // nullptr: LayerNorms are kernels, or parts of one product
  std::string refusal = "only 16-bit elements on a GPU";  // why there is none
};

// allocate(floats) gives memory of the device, aligned to 16 bytes, that must live as long as the maker; a vector made
// of gammas, betas and biases is written there on the context's stream, and a changed weight makes it stale. weights
// must outlive it too.
using AllocateFloats = std::function<float*(int64_t floats)>;
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
