// norm_forward: which kernel computes the rows.
#include "kernels/norm/training_norm_forward.cuh"

namespace ftbert {
namespace {

template <class Rows, bool kCentred>
void forward_any(Context<Cuda>& context, const NormForward& norm) {
  if (!launch_forward<Rows, void, kCentred>(context, norm)) launch_forward_long<Rows, kCentred>(context, norm);
}

}  // namespace

template bool norm_forward_plain<float>(Context<Cuda>&, const NormForward&);

void norm_forward(Context<Cuda>& context, const NormForward& norm) {
  if (norm.rows == 0 || norm.cols == 0) return;
  const auto any = [&]<class Rows>() {
    norm.kind == NormKind::layer ? forward_any<Rows, true>(context, norm) : forward_any<Rows, false>(context, norm);
  };
  with_rows_of(norm.cols, {norm.x, norm.residual, norm.sum, norm.out}, any,
               [&]<class T>() { return norm_forward_plain<T>(context, norm); });
}

}  // namespace ftbert
