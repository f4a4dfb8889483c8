// Sequences that begin alike, in one call: their common tokens are its first sequence, which goes through the layers
// once. In each layer its keys and values are repeated before those of every other sequence.
#pragma once
#include "core/context.h"
#include "core/workspace.h"
#include "layers/batch.h"
#include "layers/kv_cache.h"

namespace ftbert {

// What such a call needs beside other memory; the rows of one layer's keys and values.
template <class Device>
struct SharedPrefix {
  KvCache keys_values;
  CachePlaces places;

  // Error where the model has no cache. batch: with its shared_prefix; of the result the pointers count.
  static SharedPrefix take(Workspace& workspace, const EncoderConfig& config, AttentionPath path, DType dtype,
                           const Batch& batch);

  // Finds the tokens' positions and rows, and lets the batch, which must not outlive this, know all of it.
  void begin(Context<Device>& context, Batch& batch) const;
};

}  // namespace ftbert
