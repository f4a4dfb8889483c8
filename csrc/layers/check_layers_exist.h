// What a model can describe and no layer computes yet.
#pragma once
#include "model/config.h"

namespace ftbert {

// Throws Error that lists all of it in this config.
void check_layers_exist(const ModelConfig& config);

}  // namespace ftbert
