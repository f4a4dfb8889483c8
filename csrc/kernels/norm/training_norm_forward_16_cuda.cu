// The kernels of norm_forward for rows of 16 bits.
#include "kernels/norm/training_norm_forward.cuh"

namespace ftbert {

template bool norm_forward_plain<half_t>(Context<Cuda>&, const NormForward&);
template bool norm_forward_plain<bfloat16_t>(Context<Cuda>&, const NormForward&);

}  // namespace ftbert
