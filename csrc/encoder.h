// The encoder's forward pass, once for every device and dtype.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/context.h"
#include "core/workspace.h"
#include "layers/deferred_norm.h"
#include "model/config.h"
#include "model/weights.h"

namespace ftbert {

// Whose last hidden state the caller reads: every token's, or the first token's of each sequence. The last layer then
// computes that one alone, from the keys and values of all.
enum class OutputRows { all, first };

// Token ids on their way in: packed already, or padded with the index maps of kernels/kernels.h `padding`.
struct EncoderInput {
  const int64_t* input_ids = nullptr;       // [tokens], or [batch, seq] with token_index
  const int64_t* token_type_ids = nullptr;  // like input_ids, or nullptr: all 0
  const int64_t* token_index = nullptr;     // [tokens] rows of the padded input, or nullptr: packed
  const int32_t* cu_seqlens = nullptr;      // [batch+1]; on the CPU readable by the host
  int64_t tokens = 0;  // on a GPU it may be more than cu_seqlens[batch]: what comes of the others is nobody's
  int64_t batch = 0;
  int64_t seq = 0;         // columns of the padded input; unused when packed
  int64_t max_seqlen = 0;  // upper bound of the longest sequence
  // Packed input may bring what `place` found; else forward finds it.
  const int32_t* positions = nullptr;  // [tokens] position ids
  const int32_t* columns = nullptr;    // [tokens] columns in the padded input, for a relative position bias
  OutputRows rows = OutputRows::all;

  int64_t output_rows() const { return rows == OutputRows::first ? batch : tokens; }
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

  // Lets the products of few tokens do the LayerNorms between them (folded_layers.h), where they can. allocate(floats)
  // gives memory of that device that must live as long as this; what is written there is, on the context's stream.
  void fold_layernorms(const Context<Device>& context, const std::function<float*(int64_t floats)>& allocate);

  // Bytes of workspace that forward needs for this input (of the pointers in it only cu_seqlens is read, on the CPU).
  size_t workspace_bytes(const Context<Device>& context, const EncoderInput& input) const;

  // Rows that hidden states must have room for: a little more than tokens, since the GEMM likes round sizes.
  static int64_t padded_rows(int64_t tokens);

  // positions, columns [most] out: what EncoderInput may bring, 0 past the last token; columns may be nullptr.
  void place(Context<Device>& context, const EncoderInput& input, int64_t most, int32_t* positions,
             int32_t* columns) const;

  // out [padded_rows(output_rows), hidden]: the last hidden state of the packed tokens, or of the first of each
  // sequence (zeros for an empty one). `hook`, where given, is called with every hidden state of all tokens on the way.
  void forward(Context<Device>& context, const EncoderInput& input, Workspace workspace, T* out,
               const HiddenStateHook<T>& hook = nullptr) const;

  // first [padded_rows(batch), hidden], the hidden state of the first tokens -> tanh(pooler(first)), out of that shape
  void pool(Context<Device>& context, const T* first, const int32_t* cu_seqlens, int64_t batch, T* out) const;

  const EncoderConfig& config() const { return config_; }
  bool uses_fused_attention() const { return fused_; }
  const std::string& attention_reason() const { return reason_; }
  // Of how many tokens LayerNorms are folded, or why they are not.
  std::string folded_state(const Context<Device>& context) const;

 private:
  struct Pass;
  struct Piece;
  struct Scratch;
  struct Buffers;
  Buffers carve(const Context<Device>& context, Workspace& workspace, const EncoderInput& input) const;
  Scratch carve_scratch(Workspace& workspace, const EncoderInput& input, int64_t pass, bool alone) const;
  static std::vector<Piece> pieces(const Context<Device>& context, int64_t rows);
  void embed(Context<Device>&, const EncoderInput&, const Buffers&, T* hidden) const;
  void attend(Context<Device>&, const LayerWeights<T>&, const EncoderInput&, const Pass&, const Buffers&, const T* x,
              int64_t queries) const;
  void finish_post_norm(Context<Device>&, const LayerWeights<T>&, Buffers&, const T* attended, int64_t rows,
                        T* x) const;
  void finish_pre_norm(Context<Device>&, int64_t i, const Buffers&, const T* attended, int64_t rows, T* x,
                       T* normed) const;

  EncoderConfig config_;
  Weights<T> weights_;
  bool fused_ = true;
  std::string reason_;
  std::shared_ptr<const FoldedLayers<T>> folded_;  // nullptr: LayerNorms are kernels, or parts of one product
  std::string not_folded_ = "only 16-bit elements on a GPU";  // why not
};

}  // namespace ftbert
