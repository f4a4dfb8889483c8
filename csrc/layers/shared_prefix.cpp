#include "layers/shared_prefix.h"

#include <type_traits>

#include "core/dispatch.h"

namespace ftbert {

template <class Device>
SharedPrefix<Device> SharedPrefix<Device>::take(Workspace& workspace, const EncoderConfig& config, AttentionPath path,
                                                DType dtype, const Batch& batch) {
  const int64_t tokens = batch.tokens(), count = batch.sequences.count;
  SharedPrefix made{KvCache::of_one_layer(config, path, dtype, std::is_same_v<Device, Cpu> ? 1 : kCudaRowBytes,
                                          tokens + (count - 1) * batch.shared_prefix),
                    {}};
  made.places = {.rows = workspace.take<int32_t>(tokens),
                 .positions = workspace.take<int32_t>(tokens),
                 .begin_k = workspace.take<int32_t>(count),
                 .end_k = workspace.take<int32_t>(count)};
  made.keys_values.lie_at(workspace.take<char>(static_cast<int64_t>(made.keys_values.bytes())));
  return made;
}

template <class Device>
void SharedPrefix<Device>::begin(Context<Device>& context, Batch& batch) const {
  Sequences& s = batch.sequences;
  shared_prefix_places(context, s.cu_q, s.count, batch.shared_prefix, batch.tokens(), places);
  batch.positions = places.positions;
  batch.cache = &keys_values;
  batch.cache_rows = places.rows;
  s.cu_k = places.begin_k;
  s.end_k = places.end_k;
  s.first_k = 0;
  s.rows_k = keys_values.rows();
}

#define FTBERT_INSTANTIATE(D) template struct SharedPrefix<D>;
FTBERT_DEVICES(FTBERT_INSTANTIATE)

}  // namespace ftbert
