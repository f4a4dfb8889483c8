#include "binding/tf32.h"

#include <ATen/Context.h>

#include <type_traits>

namespace ftbert::binding {
namespace {

// PyTorch 2.9 and later; its arguments are strings, or enums since.
template <class Backend, class Op, class Precision>
bool asks_for_tf32(const at::Context& context, Precision (at::Context::*precision)(Backend, Op) const) {
  if constexpr (std::is_enum_v<Backend>)
    return (context.*precision)(Backend::CUDA, Op::MATMUL) == Precision::TF32;
  else
    return (context.*precision)("cuda", "matmul") == "tf32";
}

template <class Torch>
bool allows(const Torch& context) {
  if constexpr (requires { &Torch::float32Precision; })  // allowTF32CuBLAS fails where both interfaces were used
    return asks_for_tf32(context, &Torch::float32Precision);
  else
    return context.allowTF32CuBLAS();
}

}  // namespace

bool allows_tf32() { return !at::NoTF32Guard::should_disable_tf32() && allows(at::globalContext()); }

}  // namespace ftbert::binding
