// Whether PyTorch may round the operands of float32 products to TF32 on a GPU.
#pragma once
#include "binding/visible.h"

namespace ftbert::binding {

// As torch.backends.cuda.matmul.allow_tf32, its fp32_precision and torch.set_float32_matmul_precision say now.
FTBERT_VISIBLE bool allows_tf32();

}  // namespace ftbert::binding
