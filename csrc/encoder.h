// The encoder's forward pass for every device and dtype: embed, the layers, the output rows.
#pragma once
#include <memory>
#include <string>

#include "core/context.h"
#include "core/workspace.h"
#include "layers/attention.h"
#include "layers/deferred_norm.h"
#include "layers/layer_stack.h"
#include "layers/schedule.h"
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
  int64_t tokens = 0;                       // on a GPU an upper bound: rows past cu_seqlens[batch] are undefined
  int64_t batch = 0;
  int64_t seq = 0;         // columns of the padded input; unused when packed
  int64_t max_seqlen = 0;  // upper bound of the longest sequence
  // Packed input may bring what `find_positions` found; else forward finds it.
  const int32_t* positions = nullptr;  // [tokens] position ids
  const int32_t* columns = nullptr;    // [tokens] columns in the padded input, for a relative position bias
  OutputRows rows = OutputRows::all;

  int64_t output_rows() const { return rows == OutputRows::first ? batch : tokens; }
};

// One model on one (device, dtype). Immutable after construction: any number of threads may call it.
template <class Device, class T>
class Encoder {
 public:
  // With `allocate`, products do the work of the LayerNorms between them where they can (layers/deferred_norm.h).
  Encoder(const Context<Device>& context, EncoderConfig config, Weights<T> weights,
          std::optional<AttentionPath> attention = std::nullopt, const AllocateFloats& allocate = nullptr);
  Encoder(const Encoder&) = delete;  // the layers refer to its config and weights
  Encoder& operator=(const Encoder&) = delete;

  // Bytes of workspace that forward needs for this input (of the pointers in it only cu_seqlens is read, on the CPU).
  size_t workspace_bytes(const Context<Device>& context, const EncoderInput& input) const;

  // positions, columns [most] out: what EncoderInput may bring, 0 past the last token; columns may be nullptr.
  void find_positions(Context<Device>& context, const EncoderInput& input, int64_t most, int32_t* positions,
                      int32_t* columns) const;

  // out [rows_with_slack(output_rows), hidden]: the last hidden state of the packed tokens, or of the first of each
  // sequence (zeros for an empty one). `hook`, where given, is called with every hidden state of all tokens on the way.
  void forward(Context<Device>& context, const EncoderInput& input, Workspace workspace, T* out,
               const HiddenStateHook<T>& hook = nullptr) const;

  // first [rows_with_slack(batch), hidden], the hidden state of the first tokens -> tanh(pooler(first)), out of that
  // shape
  void pooler(Context<Device>& context, const T* first, const int32_t* cu_seqlens, int64_t batch, T* out) const;

  const EncoderConfig& config() const { return config_; }
  const AttentionChoice& attention() const { return attention_; }
  // Of how many tokens LayerNorms are deferred, or why they are not.
  std::string deferred_state(const Context<Device>& context) const;

 private:
  struct Buffers;
  Buffers carve(const Context<Device>& context, Workspace& workspace, const EncoderInput& input) const;
  void embed(Context<Device>&, const EncoderInput&, const Buffers&, T* x) const;

  const EncoderConfig config_;
  const Weights<T> weights_;
  const AttentionChoice attention_;
  const LayerStack<Device, T> layers_;
  DeferredNormChoice<Device, T> deferred_;
};

}  // namespace ftbert
