// The kernels of norm_backward for rows of fp32.
#include "kernels/norm/training_norm_backward.cuh"

namespace ftbert {

template BackwardParts norm_backward_plain<float>(Context<Cuda>&, const NormBackward&);

}  // namespace ftbert
