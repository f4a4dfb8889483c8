// The encoder's forward pass, once for every device and dtype.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "config.h"
#include "core/context.h"
#include "core/workspace.h"
#include "weights.h"

namespace ftbert {

// Token ids on their way in: packed already, or padded with the index maps of kernels/kernels.h `padding`.
struct EncoderInput {
  const int64_t* input_ids = nullptr;       // [tokens], or [batch, seq] with token_index
  const int64_t* token_type_ids = nullptr;  // like input_ids, or nullptr: all 0
  const int64_t* token_index = nullptr;     // [tokens] rows of the padded input, or nullptr: packed
  const int32_t* cu_seqlens = nullptr;      // [batch+1]; on the CPU readable by the host
  int64_t tokens = 0;
  int64_t batch = 0;
  int64_t seq = 0;         // columns of the padded input; unused when packed
  int64_t max_seqlen = 0;  // upper bound of the longest sequence
  // Packed input may bring what `place` found; else forward finds it.
  const int32_t* positions = nullptr;  // [tokens] position ids
  const int32_t* columns = nullptr;    // [tokens] columns in the padded input, for a relative position bias
};

enum class AttentionPath { automatic, fused, general };

// Sees the packed hidden states [tokens, hidden]: 0 what the layers start from, i what layer i made of it (the last
// one after a pre-LayerNorm model's final norm, as transformers counts them).
template <class T>
using HiddenStateHook = std::function<void(int64_t i, const T* hidden)>;

// One model on one (device, dtype). Immutable after construction: any number of threads may call it.
template <class Device, class T>
class Encoder {
 public:
  Encoder(EncoderConfig config, Weights<T> weights, AttentionPath path, bool fused_supported);

  // Bytes of workspace that forward needs for this input (pointers in it are not read).
  size_t workspace_bytes(const Context<Device>& context, const EncoderInput& input) const;

  // Rows that `hidden` must have room for: a little more than tokens, since the GEMM likes round sizes.
  static int64_t padded_rows(int64_t tokens);

  // positions, columns [tokens] out: what EncoderInput may bring; columns may be nullptr.
  void place(Context<Device>& context, const EncoderInput& input, int32_t* positions, int32_t* columns) const;

  // hidden [padded_rows(tokens), hidden] out: the last hidden state of the packed tokens.
  // `hook`, where given, is called with every hidden state on the way, the last one included.
  void forward(Context<Device>& context, const EncoderInput& input, Workspace workspace, T* hidden,
               const HiddenStateHook<T>& hook = nullptr) const;

  // hidden [tokens, hidden] -> tanh(pooler(first token)), scratch and out [padded_rows(batch), hidden]
  void pool(Context<Device>& context, const T* hidden, const int32_t* cu_seqlens, int64_t batch, T* scratch,
            T* out) const;

  const EncoderConfig& config() const { return config_; }
  bool uses_fused_attention() const { return fused_; }
  const std::string& attention_reason() const { return reason_; }

 private:
  struct Pass;
  struct Piece;
  struct Buffers;
  Buffers carve(const Context<Device>& context, Workspace& workspace, const EncoderInput& input) const;
  static std::vector<Piece> pieces(const Context<Device>& context, const Pass& pass);
  void embed(Context<Device>&, const EncoderInput&, const Buffers&, T* hidden) const;
  void layer_post_norm(Context<Device>&, const LayerWeights<T>&, const EncoderInput&, const Pass&, const Buffers&,
                       T* hidden) const;
  void layer_pre_norm(Context<Device>&, int64_t i, const EncoderInput&, const Pass&, const Buffers&, T* hidden) const;
  void attend(Context<Device>&, const T* qkv, const LayerWeights<T>&, const EncoderInput&, const Pass&, const Buffers&,
              T* out) const;

  EncoderConfig config_;
  Weights<T> weights_;
  bool fused_ = true;
  std::string reason_;
};

}  // namespace ftbert
