// The layers of a post-LayerNorm encoder without LayerNorm kernels, for up to some 1000 tokens: the products on both
// sides of one do its work (gemm/gemm_folded.h). Hopper alone, 16-bit elements; folded_layers_cuda.cpp. No CUDA header.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/context.h"
#include "model/config.h"
#include "model/weights.h"

namespace ftbert {

template <class T>
struct FoldedInput {
  const int32_t* cu_seqlens = nullptr;  // [batch+1]
  int64_t tokens = 0, batch = 0;
  int64_t max_seqlen = 0;  // upper bound of the longest sequence
  int64_t layers = 0;      // how many of the model's layers to run
  void* attention_scratch = nullptr;
  // With room for kGemmRowSlack more rows.
  T* hidden = nullptr;   // [tokens, hidden], what the first layer reads; in the end what the last one made of it
  T* sum = nullptr;      // [tokens, hidden], from here on scratch: what LayerNorm is pending on, times its gamma
  T* qkv = nullptr;      // [tokens, 3*hidden]
  T* context = nullptr;  // [tokens, hidden]
  T* inner = nullptr;    // [tokens, inter]; may share memory with qkv and context
  long long* moments = nullptr;  // FoldedLayers::moments_words
};

// One model's layers on one device. Immutable: any number of threads may run it, each on buffers of its own.
template <class T>
class FoldedLayers {
 public:
  // Why these layers cannot run so; "" where they can.
  static std::string refusal(const Context<Cuda>& context, const EncoderConfig& config,
                             const std::vector<LayerWeights<T>>& layers);

  // Weights are read where they are. What gammas, betas and biases make of them is written into `memory`,
  // [memory_floats()], on the context's stream; a changed weight makes it stale. All must live as long as this.
  FoldedLayers(const Context<Cuda>& context, const EncoderConfig& config, const std::vector<LayerWeights<T>>& layers,
               float* memory);
  static int64_t memory_floats(const EncoderConfig& config);
  static int64_t moments_words(int64_t tokens);

  // Which variant of gemm_few_cuda.cu each product of a layer runs.
  struct Products {
    int qkv, out, up, down;
  };
  // Those of so many tokens, where all four run such products also with LayerNorms: what the tuner found faster than
  // they is not given up for this.
  std::optional<Products> takes(const Context<Cuda>& context, int64_t tokens) const;
  // More than these are never taken: from there on LayerNorms are faster.
  int64_t most_tokens() const { return most_tokens_; }
  // For people, which numbers of tokens are: "1 to 320, 385 to 512".
  std::string sizes(const Context<Cuda>& context) const;

  void run(Context<Cuda>& context, const FoldedInput<T>& input, const Products& products) const;

 private:
  // gemm/gemm_folded.h
  struct CorrectionVectors {
    float *add, *slope;
  };
  struct SumVectors {
    float *add, *gamma, *unscale;
  };
  struct LayerVectors {
    CorrectionVectors qkv, up;
    SumVectors out, down, last_down;  // last_down: where this layer is the last to run
  };

  EncoderConfig config_;
  std::vector<LayerWeights<T>> layers_;
  int64_t most_tokens_;
  std::vector<LayerVectors> vectors_;
};

}  // namespace ftbert
