// Keys and values of earlier tokens, which attention reads beside those of a call's own.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/kernels.h"
#include "layers/batch.h"
#include "layers/buffers.h"
#include "model/config.h"

namespace ftbert {

// [layer][k | v][slot][position][kv_width] of the stream's type, in memory that its owner holds. A slot has the tokens
// of one sequence, from position 0 on; how many, its owner counts.
class KvCache {
 public:
  // Error, with the reason, where the model's attention needs more than keys and values of earlier tokens, there are
  // more positions than the model's, or rows do not begin at multiples of row_bytes.
  KvCache(const ModelConfig& config, AttentionPath path, DType dtype, int64_t row_bytes, int64_t slots,
          int64_t positions);

  // For a single call: so many rows, without slots. Each layer writes over the rows of the layer before.
  static KvCache of_one_layer(const ModelConfig& config, AttentionPath path, DType dtype, int64_t row_bytes,
                              int64_t rows);

  size_t bytes() const { return static_cast<size_t>(bytes_); }
  void lie_at(void* memory) { memory_ = static_cast<char*>(memory); }  // 16-byte aligned, of bytes()

  int64_t slots() const { return slots_; }
  int64_t positions() const { return positions_; }  // of a slot
  int64_t rows() const { return slots_ * positions_; }

  // A layer's, [rows, kv_width]; row slot * positions + position.
  template <class T>
  T* keys(int64_t layer) const {
    return reinterpret_cast<T*>(memory_ + offsets_[2 * layer]);
  }
  template <class T>
  T* values(int64_t layer) const {
    return reinterpret_cast<T*>(memory_ + offsets_[2 * layer + 1]);
  }

  // The first `length` positions of one slot over those of another.
  template <class Device>
  void copy_prefix(const Context<Device>& context, int64_t from, int64_t to, int64_t length) const;

 private:
  KvCache(const ModelConfig& config, DType dtype, int64_t slots, int64_t positions);

  int64_t slots_, positions_, bytes_ = 0;
  std::vector<int64_t> offsets_;    // in bytes: of each layer's keys, then its values
  std::vector<int64_t> row_bytes_;  // of each layer
  char* memory_ = nullptr;
};

// Room for the places of a batch's tokens in a cache.
CachePlaces take_places(Workspace& workspace, const Batch& batch);
// The batch, which has its cache, with tokens, keys and values at these places.
void put_at(const CachePlaces& places, Batch& batch);

// Sequences that begin alike, in one call: their common tokens are its first sequence, which goes through the layers
// once. In each layer its keys and values are repeated before those of every other sequence.
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
