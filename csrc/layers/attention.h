// A layer's first block up to its last product: attention over the packed tokens.
#pragma once
#include <string>

#include "kernels/kernels.h"
#include "layers/batch.h"
#include "layers/buffers.h"
#include "model/weights.h"

namespace ftbert {

enum class AttentionPath { automatic, fused, general };

// Which path the layers of a model take, decided once: the fused one (no score matrix in memory), or the mission's
// general one (add_qkv_bias, product, softmax, product, transpose), which takes any head size.
struct AttentionChoice {
  bool fused = true;
  std::string reason;  // for people
};

// Error where the fused path is asked for and a layer's head size has no kernel on this device.
template <class Device, class T>
AttentionChoice choose_attention(const Context<Device>& context, const EncoderConfig& config, AttentionPath path);

// b.attended [run.tokens, width] = softmax(q k^T / sqrt(head_size) + bias) v of x [run.tokens, hidden]; of each
// sequence the first `queries` rows at least. relative_bias: the model's table, read where the layer has such a bias.
template <class Device, class T>
void attend(Context<Device>& context, const Layer<T>& layer, const PackedBatch& batch, const Run& run, const T* x,
            int64_t queries, const RelativeBias<T>& relative_bias, bool fused, const LayerBuffers<T>& b);

}  // namespace ftbert
