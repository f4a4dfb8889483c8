// The ops of TorchScript files that were saved before forward_batch.
#pragma once
#include <torch/library.h>

namespace ftbert::binding {

// After the class Encoder, which the ops' schemas name.
void define_retired_ops(torch::Library& m);

}  // namespace ftbert::binding
