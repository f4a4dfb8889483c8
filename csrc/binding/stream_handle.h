// The CUDA stream behind a stream of torch's, found without any CUDA header of torch: this source builds against CPU
// and CUDA builds of torch alike.
#pragma once
#include <c10/core/Stream.h>

#include "binding/visible.h"

namespace ftbert::binding {

// The cudaStream_t of a stream on a GPU.
FTBERT_VISIBLE void* native_handle(const c10::Stream& stream);

}  // namespace ftbert::binding
