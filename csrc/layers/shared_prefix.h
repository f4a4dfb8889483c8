// Sequences that begin alike, in one call: their common tokens are its first sequence, which goes through the layers
// once. In each layer its keys and values are repeated before those of every other sequence.
#pragma once
#include "core/context.h"
#include "core/workspace.h"
#include "layers/batch.h"
#include "layers/kv_cache.h"

namespace ftbert {

// Of one call.
template <class Device>
class SharedPrefix {
 public:
  // batch: with its shared_prefix; it becomes one with a cache, this one's, which must outlive it. Before the call is
  // planned. Error where the model has no cache.
  SharedPrefix(const ModelConfig& config, AttentionPath path, DType dtype, Batch& batch);
  SharedPrefix(const SharedPrefix&) = delete;
  SharedPrefix& operator=(const SharedPrefix&) = delete;

  // What it needs of the call's workspace: places, and rows for the keys and values of a layer.
  void take(Workspace& workspace, const Batch& batch);
  // Finds where the tokens stand, and their keys lie.
  void find_places(Context<Device>& context, Batch& batch) const;

 private:
  KvCache keys_values_;
  CachePlaces places_{};
};

}  // namespace ftbert
