// Where the tokens of a batch stand: their position ids, and their columns for a relative bias and rotary positions.
#pragma once
#include <cstdint>

#include "core/workspace.h"
#include "layers/batch.h"
#include "model/config.h"

namespace ftbert {

struct Positions {
  int32_t* ids = nullptr;      // [tokens]
  int32_t* columns = nullptr;  // [tokens], the same memory where both are the same; nullptr: not needed

  // For ids that are padded, or packed.
  static Positions take(Workspace& workspace, const ModelConfig& config, int64_t tokens, bool padded);
};

// Finds them by the rule of the model's position table, for up to `most` tokens of batch.ids: 0 past the last.
template <class Device>
void find_positions(Context<Device>& context, const ModelConfig& config, const Batch& batch, int64_t most,
                    const Positions& positions);

}  // namespace ftbert
