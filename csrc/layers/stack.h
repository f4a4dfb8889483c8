// The orders in which a model's layers run: a stack is chosen before the loop over layers.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "core/context.h"
#include "layers/batch.h"
#include "layers/buffers.h"

namespace ftbert {

// Sees the packed hidden states [tokens, hidden]: 0 what the layers start from, i what layer i made of it (the last
// one after a pre-LayerNorm model's final norm, as transformers counts them).
template <class T>
using HiddenStateHook = std::function<void(int64_t i, const T* hidden)>;

// Layers of one model on one device. Immutable: any number of threads may run it, each on buffers of its own.
template <class Device, class T>
class Stack {
 public:
  virtual ~Stack() = default;

  // x [tokens, hidden], the embedding's output, becomes what the model's first `layers` layers make of it, in the rows
  // of these runs.
  virtual void run(Context<Device>& context, const PackedBatch& batch, const std::vector<Run>& runs, int64_t layers,
                   LayerBuffers<T>& b, T* x, const HiddenStateHook<T>& hook) const = 0;
};

}  // namespace ftbert
