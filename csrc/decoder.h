// A causal model's logits: the encoder's layers over a cache of keys and values, then the head over the vocabulary. Of
// a stage before the last there is no head, and its stream is the result.
#pragma once
#include <algorithm>

#include "encoder.h"
#include "layers/kv_cache.h"

namespace ftbert {

// Any number of threads may call it, with slots of their own.
template <class Device, class T>
class Decoder {
 public:
  // head [vocab, hidden], absent of a stage before the last. Encoder and cache must outlive this.
  Decoder(const Context<Device>& context, const Encoder<Device, T>& encoder, const Linear<T>& head,
          const KvCache& cache);

  // How forward runs a batch: packed tokens, at least one of each sequence, all of whose rows or the last of each
  // sequence are read. Its max_k is an upper bound of a sequence's tokens with those in its slot.
  struct Plan {
    typename Encoder<Device, T>::Plan encoder;
    size_t bytes = 0;  // of workspace
  };
  Plan plan(const Context<Device>& context, const Batch& batch) const;

  // Of Context::weight_scratch.
  size_t weight_scratch_bytes(const Context<Device>& context, int64_t tokens, int64_t output_rows) const {
    return std::max(encoder_.weight_scratch_bytes(context, std::max(tokens, output_rows)),
                    ftbert::weight_scratch_bytes(context, head_, output_rows));
  }

  // Tokens that follow those in the slots, which then hold them too -> out [rows_with_slack(output_rows), cols].
  // What is launched depends on the batch's sizes alone: ids, slots and lengths are read on the device.
  void forward(Context<Device>& context, const Batch& batch, const CacheSlots& slots, const Plan& plan,
               Workspace workspace, T* out) const;

  // Of what it makes: the vocabulary's, or hidden.
  int64_t cols() const { return has_head() ? head_.weight.n : encoder_.config().hidden; }

 private:
  struct Buffers;
  bool has_head() const { return encoder_.config().stage.last(); }
  Batch cached(const Batch& batch) const;
  Buffers carve(Workspace& workspace, const Batch& batch, const typename Encoder<Device, T>::Plan& encoder) const;

  const Encoder<Device, T>& encoder_;
  const Linear<T> head_;
  const KvCache& cache_;
};

}  // namespace ftbert
