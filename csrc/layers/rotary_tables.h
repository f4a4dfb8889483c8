// The cosines and sines of a model's rotary positions, made where the model is.
#pragma once
#include "core/context.h"
#include "core/workspace.h"
#include "model/config.h"
#include "model/weights.h"

namespace ftbert {

// weights with the rotation of each layer, one table of config.max_positions rows for each distinct Rotary.
template <class Device, class T>
Weights<T> with_rotary_tables(const Context<Device>& context, const ModelConfig& config, Weights<T> weights,
                              const AllocateFloats& allocate);

}  // namespace ftbert
