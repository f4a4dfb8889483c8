// The kernels of norm_backward for rows of fp16.
#include "kernels/norm/training_norm_backward.cuh"

namespace ftbert {

template BackwardParts norm_backward_plain<half_t>(Context<Cuda>&, const NormBackward&);

}  // namespace ftbert
