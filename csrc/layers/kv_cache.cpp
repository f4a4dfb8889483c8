#include "layers/kv_cache.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "core/check.h"
#include "core/device.h"
#include "core/dispatch.h"

namespace ftbert {
namespace {

// Error where something keeps a model from reading keys of earlier tokens.
void check_cache(const ModelConfig& config, AttentionPath path, DType dtype, int64_t row_bytes) {
  static constexpr auto kNone = "this model has no cache of keys and values: ";
  for (const LayerConfig& layer : config.layers)
    FTBERT_CHECK(layer.attention.window.right == 0, kNone, "its tokens see those that follow: it is an encoder");
  FTBERT_CHECK(!config.by_distance(), kNone, "it adds relative biases to scores");
  FTBERT_CHECK(!config.counts_tokens(), kNone, "its positions depend on padding ids");
  FTBERT_CHECK(path == AttentionPath::fused, kNone, "its attention runs by the general path, which reads no cache");
  for (const LayerConfig& layer : config.layers) {
    const int64_t bytes = layer.attention.heads.kv_width() * bytes_of(dtype);
    FTBERT_CHECK(bytes % row_bytes == 0, kNone, "a row of its keys has ", bytes, " bytes, no multiple of ", row_bytes);
  }
}

}  // namespace

KvCache::KvCache(const ModelConfig& config, DType dtype, int64_t slots, int64_t positions)
    : slots_(slots), positions_(positions) {
  for (const LayerConfig& layer : config.layers)
    row_bytes_.push_back(layer.attention.heads.kv_width() * bytes_of(dtype));
}

KvCache::KvCache(const ModelConfig& config, AttentionPath path, DType dtype, int64_t row_bytes, int64_t slots,
                 int64_t positions)
    : KvCache(config, dtype, slots, positions) {
  check_cache(config, path, dtype, row_bytes);
  FTBERT_CHECK(slots > 0 && positions > 0 && positions <= config.max_seq(), "a cache has at least one slot, of 1 to ",
               config.max_seq(), " positions, which the model has; got ", slots, " slots of ", positions);
  FTBERT_CHECK(slots <= std::numeric_limits<int32_t>::max() / positions, "a cache has at most 2^31-1 positions, got ",
               slots, " slots of ", positions);
  for (const int64_t bytes : row_bytes_)
    for (int i = 0; i < 2; ++i) offsets_.push_back(bytes_), bytes_ += rows() * bytes;
}

KvCache KvCache::of_one_layer(const ModelConfig& config, AttentionPath path, DType dtype, int64_t row_bytes,
                              int64_t rows) {
  check_cache(config, path, dtype, row_bytes);
  FTBERT_CHECK(rows <= std::numeric_limits<int32_t>::max(), "at most 2^31-1 keys in one call, got ", rows);
  KvCache made(config, dtype, 1, rows);
  for (const int64_t bytes : made.row_bytes_) {
    // Values begin where a GPU can read them.
    const int64_t plane = (rows * bytes + Workspace::kAlignment - 1) / Workspace::kAlignment * Workspace::kAlignment;
    made.offsets_.insert(made.offsets_.end(), {0, plane});
    made.bytes_ = std::max(made.bytes_, 2 * plane);
  }
  return made;
}

template <class Device>
void KvCache::copy_prefix(const Context<Device>& context, int64_t from, int64_t to, int64_t length) const {
  for (size_t i = 0; i < offsets_.size(); ++i) {
    const int64_t row = row_bytes_[i / 2], slot = positions_ * row;
    char* const plane = memory_ + offsets_[i];
    copy_on_device(context, plane + from * slot, plane + to * slot, row * length);
  }
}

CachePlaces take_places(Workspace& workspace, const Batch& batch) {
  const int64_t tokens = batch.tokens(), count = batch.sequences.count;
  return {.rows = workspace.take<int32_t>(tokens),
          .positions = workspace.take<int32_t>(tokens),
          .begin_k = workspace.take<int32_t>(count),
          .end_k = workspace.take<int32_t>(count)};
}

void put_at(const CachePlaces& places, Batch& batch) {
  batch.positions = places.positions, batch.cache_rows = places.rows;
  Sequences& s = batch.sequences;
  s.cu_k = places.begin_k, s.end_k = places.end_k;
  s.first_k = 0, s.rows_k = batch.cache->rows();
}

template <class Device>
SharedPrefix<Device>::SharedPrefix(const ModelConfig& config, AttentionPath path, DType dtype, Batch& batch)
    : keys_values_(KvCache::of_one_layer(config, path, dtype, std::is_same_v<Device, Cpu> ? 1 : kCudaRowBytes,
                                         batch.tokens() + (batch.sequences.count - 1) * batch.shared_prefix)) {
  batch.cache = &keys_values_;
}

template <class Device>
void SharedPrefix<Device>::take(Workspace& workspace, const Batch& batch) {
  places_ = take_places(workspace, batch);
  keys_values_.lie_at(workspace.take<char>(static_cast<int64_t>(keys_values_.bytes())));
}

template <class Device>
void SharedPrefix<Device>::find_places(Context<Device>& context, Batch& batch) const {
  shared_prefix_places(context, batch.sequences.cu_q, batch.sequences.count, batch.shared_prefix, batch.tokens(),
                       places_);
  put_at(places_, batch);
}

#define FTBERT_INSTANTIATE(D)                                                             \
  template void KvCache::copy_prefix(const Context<D>&, int64_t, int64_t, int64_t) const; \
  template class SharedPrefix<D>;
FTBERT_DEVICES(FTBERT_INSTANTIATE)

}  // namespace ftbert
