// The kernels of norm_backward for rows of bf16.
#include "kernels/norm/training_norm_backward.cuh"

namespace ftbert {

template BackwardParts norm_backward_plain<bfloat16_t>(Context<Cuda>&, const NormBackward&);

}  // namespace ftbert
