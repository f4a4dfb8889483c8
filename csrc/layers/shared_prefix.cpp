#include "layers/shared_prefix.h"

#include <type_traits>

#include "core/dispatch.h"

namespace ftbert {

template <class Device>
SharedPrefix<Device>::SharedPrefix(const ModelConfig& config, AttentionPath path, DType dtype, Batch& batch)
    : keys_values_(KvCache::of_one_layer(config, path, dtype, std::is_same_v<Device, Cpu> ? 1 : kCudaRowBytes,
                                         batch.tokens() + (batch.sequences.count - 1) * batch.shared_prefix)) {
  batch.cache = &keys_values_;
}

template <class Device>
void SharedPrefix<Device>::take(Workspace& workspace, const Batch& batch) {
  const int64_t tokens = batch.tokens(), count = batch.sequences.count;
  places_ = {.rows = workspace.take<int32_t>(tokens),
             .positions = workspace.take<int32_t>(tokens),
             .begin_k = workspace.take<int32_t>(count),
             .end_k = workspace.take<int32_t>(count)};
  keys_values_.lie_at(workspace.take<char>(static_cast<int64_t>(keys_values_.bytes())));
}

template <class Device>
void SharedPrefix<Device>::find_places(Context<Device>& context, Batch& batch) const {
  Sequences& s = batch.sequences;
  shared_prefix_places(context, s.cu_q, s.count, batch.shared_prefix, batch.tokens(), places_);
  batch.positions = places_.positions;
  batch.cache_rows = places_.rows;
  s.cu_k = places_.begin_k;
  s.end_k = places_.end_k;
  s.first_k = 0;
  s.rows_k = keys_values_.rows();
}

#define FTBERT_INSTANTIATE(D) template class SharedPrefix<D>;
FTBERT_DEVICES(FTBERT_INSTANTIATE)

}  // namespace ftbert
