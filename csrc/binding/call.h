// One call of a model as a caller makes it: what comes in, and what is wanted of it.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>

namespace ftbert::binding {

struct DecoderCache;  // binding/decoder_cache.h

// Padded ids with an optional mask, or packed ids with the offsets of the sequences.
struct Call {
  at::Tensor input_ids;                           // int64 or int32 [batch, seq]; packed: [tokens]
  std::optional<at::Tensor> attention_mask = {};  // [batch, seq], 0 or 1; padded input alone
  std::optional<at::Tensor> token_type_ids = {};  // like input_ids
  std::optional<at::Tensor> cu_seqlens = {};      // int32 [batch+1]: the ids are packed
  int64_t max_seqlen = 0;                         // of packed input: at least the longest sequence
  std::optional<at::Tensor> rows = {};            // int64 or int32 [n], packed tokens: of Want::rows
  // Of packed input: tokens of the first sequence, behind which all others go on; max_seqlen counts them with each.
  int64_t shared_prefix = 0;
  // int32 [batch], of packed input: so many tokens of each sequence are keys, the first; all attend to these alone.
  std::optional<at::Tensor> keys = {};
  // Of a later stage: what the stage before has left of these tokens, [tokens, hidden] on this stage's device. Asked
  // once, when all else has been checked.
  std::function<at::Tensor(int64_t tokens)> hidden = {};
  // Of a decoder: packed ids, at least one of each sequence, that follow the tokens in slots of a cache. One cache for
  // each device of the model; cu_seqlens and slots are checked, and lie on the host.
  std::span<const std::unique_ptr<DecoderCache>> caches = {};
  at::Tensor slots = {};  // int32 [batch]
  int64_t max_held = 0;   // most tokens that a slot then holds

  // move(tensor) of the ids and of what is given beside them, but for the mask, which may go elsewhere.
  template <class Move>
  void move_ids(const Move& move) {
    move(input_ids);
    for (std::optional<at::Tensor>* given : {&token_type_ids, &cu_seqlens, &rows, &keys})
      if (*given) move(**given);
  }
};

enum class Want {
  tokens,         // last hidden state as the ids lie: [batch, seq, hidden] with zeros at padding, or [tokens, hidden]
  packed_tokens,  // last hidden state of the valid tokens [tokens, hidden]
  packed_index,   // of padded input: int32 [batch*seq], row of the padded input -> row of packed_tokens, -1 at padding
  cu_seqlens,     // int32 [batch+1], offsets of the sequences in packed_tokens
  first,          // last hidden state of each sequence's first token [batch, hidden], 0 for an empty one
  last,           // the same of each sequence's last token
  rows,           // last hidden state of the tokens that the call names [n, hidden]
  pooled,         // tanh(pooler(first)) [batch, hidden]; [batch, 0] where the model has no pooler
  hidden_states,  // the embedding's output, then every layer's: [layers+1, ...] over the shape of `tokens`
  logits,         // of a decoder alone: [tokens, vocab]
  last_logits,    // the same of each sequence's last token [batch, vocab]
};

}  // namespace ftbert::binding
