// The fused path's kernels that store E4M3: on Hopper, without a bias, for heads of 32, 64 and 128. A file of its own,
// since attention's are the longest to compile.
#include "core/check.h"
#include "kernels/attention/attention_launch.cuh"

namespace ftbert {

template <class T>
bool attention_e4m3(const AttentionCall& call, const Operand& out) {
  using E = native_t<T>;
  const E4m3Rows to(out);
  FTBERT_CHECK(reinterpret_cast<uintptr_t>(to.data) % 16 == 0, "attention stores e4m3 from a multiple of 16 bytes on");
  if (!call.hopper || call.bias_table) return false;
  const bool whole = whole_sequences(call);
  switch (call.heads.size) {
    case 32:
      if (whole) return launch_whole_hopper<E, 32>(call, to);
      return launch_window<E, 32>(call, to), true;
    case 64:
      if (whole) return launch_whole_hopper<E, 64>(call, to);
      return launch_window<E, 64>(call, to), true;
    case 128: return launch_window<E, 128>(call, to), true;
    default: return false;
  }
}

template bool attention_e4m3<half_t>(const AttentionCall&, const Operand&);
template bool attention_e4m3<bfloat16_t>(const AttentionCall&, const Operand&);

}  // namespace ftbert
