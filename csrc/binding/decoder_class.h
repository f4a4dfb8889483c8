// torch.classes.ftbert.Decoder: an encoder's layers as a language model, with a cache of keys and values of its own.
#pragma once
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "binding/decoder_cache.h"
#include "binding/encoder_class.h"

namespace ftbert::binding {

class DecoderClass : public torch::CustomClassHolder {
 public:
  // weight [vocab, hidden] of the head, bias [vocab] or none, of the stream's type on the encoder's device; with scale
  // fp16 [vocab, hidden / 32] the weight is int8, in q8_0. On the CPU, and in q8_0, the weight is packed, a copy also
  // where it is the word table. The cache has `slots` of `positions` tokens. Error where the encoder's attention reads
  // no cache.
  DecoderClass(EncoderPtr encoder, const at::Tensor& weight, std::optional<at::Tensor> bias, int64_t slots,
               int64_t positions, std::optional<at::Tensor> scale);

  // The same with a cache of its own, empty; the head is shared.
  c10::intrusive_ptr<DecoderClass> with_cache(int64_t slots, int64_t positions);

  // input_ids int64 or int32 [tokens] on the model's device, packed; cu_seqlens int32 [batch+1] and slots int32
  // [batch], no slot twice and no sequence empty, on the CPU. Tokens follow those in the slots, which then hold them
  // too. -> logits [batch, vocab] of each sequence's last token, or [tokens, vocab] of all. Nothing is computed where a
  // slot lacks the room. On a GPU an id outside the vocabulary gives NaN. Calls of different streams follow each other.
  at::Tensor forward(const at::Tensor& input_ids, const at::Tensor& cu_seqlens, const at::Tensor& slots, bool all_rows);

  std::vector<int64_t> lengths() const;  // of tokens, by slot
  int64_t positions() const { return cache().positions(); }
  int64_t recorded() const;                     // CUDA graphs of steps so far
  void truncate(int64_t slot, int64_t length);  // forgets all but the first `length` tokens
  // Each of `to` becomes the first `length` tokens of `from`; after an error within the copy it is empty.
  void copy_prefix(int64_t from, const std::vector<int64_t>& to, int64_t length);

 private:
  // heads: by device of the encoder.
  DecoderClass(EncoderPtr encoder, const std::vector<DecoderHead>& heads, int64_t slots, int64_t positions);
  const KvCache& cache() const { return caches_.front()->cache; }
  void check_slot(const char* name, int64_t slot) const;
  void check_length(int64_t slot, int64_t length) const;
  void set_length(int64_t slot, int64_t length);  // on every device

  mutable std::mutex mutex_;  // calls change lengths, and are uses in the caches' orders
  const EncoderPtr encoder_;
  std::vector<std::unique_ptr<DecoderCache>> caches_;  // on the encoder's device, or its ranks' or stages'
  std::vector<int64_t> lengths_;                       // as on each device
};

}  // namespace ftbert::binding
