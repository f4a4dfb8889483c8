#include "layers/kv_cache.h"

#include <algorithm>
#include <limits>
#include <string>

#include "core/check.h"
#include "core/device.h"
#include "core/dispatch.h"

namespace ftbert {
namespace {

// What keeps a model from reading keys of earlier tokens; "" for none.
std::string why_no_cache(const ModelConfig& config, AttentionPath path, DType dtype, int64_t row_bytes) {
  for (const LayerConfig& layer : config.layers)
    if (layer.attention.window.right != 0) return "its tokens see those that follow: it is an encoder";
  if (config.relative_span > 0) return "it adds relative biases to scores";
  if (config.counts_tokens()) return "its positions depend on padding ids";
  if (path == AttentionPath::general) return "its attention runs by the general path, which reads no cache";
  for (const LayerConfig& layer : config.layers)
    if (const int64_t bytes = layer.attention.heads.kv_width() * bytes_of(dtype); bytes % row_bytes != 0)
      return "a row of its keys has " + std::to_string(bytes) + " bytes, no multiple of " + std::to_string(row_bytes);
  return "";
}

void check_cache(const ModelConfig& config, AttentionPath path, DType dtype, int64_t row_bytes) {
  const std::string why_not = why_no_cache(config, path, dtype, row_bytes);
  FTBERT_CHECK(why_not.empty(), "this model has no cache of keys and values: ", why_not);
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

#define FTBERT_INSTANTIATE(D) template void KvCache::copy_prefix(const Context<D>&, int64_t, int64_t, int64_t) const;
FTBERT_DEVICES(FTBERT_INSTANTIATE)

}  // namespace ftbert
