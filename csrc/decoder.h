// A causal model's logits: the encoder's layers over a cache of keys and values, then the head over the vocabulary.
#pragma once
#include <algorithm>

#include "encoder.h"
#include "layers/kv_cache.h"

namespace ftbert {

// Any number of threads may call it, with slots of their own.
template <class Device, class T>
class Decoder {
 public:
  // head [vocab, hidden]. Encoder and cache must outlive this.
  Decoder(const Context<Device>& context, const Encoder<Device, T>& encoder, const Linear<T>& head,
          const KvCache& cache);

  // Of workspace for this batch: packed tokens, all of whose rows or the last of each sequence are read. Its max_k is
  // an upper bound of a sequence's tokens with those in its slot.
  size_t bytes(const Context<Device>& context, const Batch& batch) const;

  // Of Context::weight_scratch.
  size_t weight_scratch_bytes(const Context<Device>& context, const Batch& batch) const {
    return std::max(encoder_.weight_scratch_bytes(context, batch.tokens()),
                    ftbert::weight_scratch_bytes(context, head_, batch.output_rows()));
  }

  // Tokens that follow those in the slots, which then hold them too -> logits [rows_with_slack(output_rows), vocab].
  void forward(Context<Device>& context, const Batch& batch, const CacheSlots& slots, Workspace workspace,
               T* logits) const;

 private:
  struct Buffers;
  Buffers carve(const Context<Device>& context, Workspace& workspace, const Batch& batch) const;

  const Encoder<Device, T>& encoder_;
  const Linear<T> head_;
  const KvCache& cache_;
};

}  // namespace ftbert
