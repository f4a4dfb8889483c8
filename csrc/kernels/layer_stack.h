// The layers of a post-LayerNorm encoder in one kernel, for calls of few tokens: what such a call takes is the latency
// of seven kernels a layer, not their work. Hopper alone, 16-bit elements; layer_stack_cuda.cu. No CUDA header.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "config.h"
#include "core/context.h"
#include "weights.h"

namespace ftbert {

// Of one call, at most: more tokens are faster kernel by kernel.
inline constexpr int64_t kMostStackTokens = 128;

template <class T>
struct StackInput {
  const int32_t* cu_seqlens = nullptr;  // [batch+1]
  int64_t tokens = 0, batch = 0;
  int64_t max_seqlen = 0;    // upper bound of the longest sequence
  int64_t layers = 0;        // how many of the model's layers to run
  T* hidden = nullptr;       // [tokens, hidden], what the first layer reads; in the end what the last one made of it
  T* sum = nullptr;          // [tokens, hidden], from here on scratch: a block's result and the residual
  T* scaled = nullptr;       // [tokens, hidden], the sum by the gamma of the LayerNorm that follows
  T* qkv = nullptr;          // [tokens, 3*hidden]
  T* context = nullptr;      // [tokens, hidden]
  T* inner = nullptr;        // [tokens, inter]; may share memory with qkv and context
  float* moments = nullptr;  // [hidden / 64, tokens, 2]
  uint32_t* arrivals = nullptr;  // [1]
};

// One model's layers on one device. Immutable: any number of threads may run it, each on buffers of its own.
template <class T>
class LayerStack {
 public:
  // Why these layers cannot run so; "" where they can.
  static std::string refusal(const Context<Cuda>& context, const EncoderConfig& config,
                             const std::vector<LayerWeights<T>>& layers);

  // Weight matrices, gammas and betas are read where they are. Biases, and gammas and betas times the matrices behind
  // them, are written into `memory`, [memory_floats()], on the context's stream; a changed weight makes them stale. All
  // of it must live as long as this.
  LayerStack(const Context<Cuda>& context, const EncoderConfig& config, const std::vector<LayerWeights<T>>& layers,
             float* memory);
  static int64_t memory_floats(const EncoderConfig& config);
  ~LayerStack();
  LayerStack(const LayerStack&) = delete;
  LayerStack& operator=(const LayerStack&) = delete;

  // kMostStackTokens, or fewer where the model is too large for that.
  int64_t most_tokens() const;
  // input.tokens: up to most_tokens(); input.batch: up to kMostStackTokens.
  void run(const Context<Cuda>& context, const StackInput<T>& input) const;

 private:
  struct Prepared;
  std::unique_ptr<const Prepared> prepared_;
};

}  // namespace ftbert
