// softmax(scale * q k^T + bias) v within each sequence, on packed tokens, without a score matrix in memory.
#include <cmath>
#include <type_traits>

#include "core/check.h"
#include "core/dispatch.h"
#include "kernels/attention/attention_launch.cuh"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

// Whole sequences, with kernels compiled for them by themselves. As few warps as the longest needs; 128 queries at most
// share one pass over the keys.
template <class E, int kHeadSize>
void launch_whole(const Call& call) {
  constexpr int kRowTiles = row_tiles(kHeadSize);
  const int64_t longest = call.sequences.max_k;
  if (call.bias_table) {
    if (longest <= 64) return launch_mma<E, kHeadSize, 4, 1, true>(call);
    return launch_mma<E, kHeadSize, 4, kRowTiles, true>(call);
  }
  if constexpr (kHeadSize <= 64)
    if (call.hopper && launch_whole_hopper<E, kHeadSize>(call)) return;
  if (longest <= 16) return launch_mma<E, kHeadSize, 1, 1>(call);
  if (longest <= 32) return launch_mma<E, kHeadSize, 2, 1>(call);
  if (longest <= 64) return launch_mma<E, kHeadSize, 4, 1>(call);
  launch_mma<E, kHeadSize, 8 / kRowTiles, kRowTiles>(call);
}

template <class T, int kHeadSize>
void launch(const Call& call) {
  using E = native_t<T>;
  // Whether there are kernels of whole sequences. Those with a window run them too.
  constexpr bool kWhole = kHeadSize == 32 || kHeadSize == 64 || kHeadSize == 128;
  const bool whole = kWhole && whole_sequences(call);
  if constexpr (std::is_same_v<T, float>) {
    if constexpr (kWhole)
      if (whole) return launch_simt<kHeadSize>(call);
    launch_simt<kHeadSize>(call, window_parameters<E>(call));
  } else {
    const bool warpgroups = call.hopper && !call.bias_table;
    if (warpgroups && (kHeadSize > 64 || !whole)) return launch_window<E, kHeadSize>(call);
    if constexpr (kWhole)
      if (whole) return launch_whole<E, kHeadSize>(call);
    launch_mma<E, kHeadSize, 4, row_tiles(kHeadSize), true>(call, window_parameters<E>(call));
  }
}

}  // namespace

template <class Device, class T>
Operand attention(Context<Device>& context, const Heads& heads, const QueriesKeysValues& from,
                  const Sequences& sequences, const ScorePolicy<T>& policy, const AttentionScratch& scratch,
                  const Operand& out) {
  if (sequences.count == 0 || sequences.max_k == 0) return out;
  FTBERT_CHECK((attention_supports<Device, T>(context, heads)), "attention: no fused kernel for head size ",
               heads.size);
  FTBERT_CHECK(from.dtype == kDType<T>, "attention on a GPU reads q, k and v in the stream's type");
  T* const to = out.scaled() ? static_cast<T*>(out.data) : out.template as<T>();
  const Call call{context,
                  heads,
                  from,
                  sequences,
                  policy.window,
                  policy.bias.table,
                  policy.bias.columns,
                  static_cast<int>(policy.bias.span),
                  to,
                  static_cast<float>(M_LOG2E * static_cast<double>(heads.scale)),
                  has_warpgroups(context.capability)};
  if (attention_decode<T>(call, scratch)) return Operand::of(to);
  if constexpr (sizeof(T) == 2)
    if (out.scaled() && attention_e4m3<T>(call, out)) return out;
  switch (heads.size) {
    case 32: launch<T, 32>(call); break;
    case 64: launch<T, 64>(call); break;
    case 80: launch<T, 80>(call); break;
    case 96: launch<T, 96>(call); break;
    case 128: launch<T, 128>(call); break;
    case 256: launch<T, 256>(call); break;
    default: throw Error("attention_supports and attention do not agree");
  }
  return Operand::of(to);
}

template <class Device, class T>
DType attention_operand(DType) {
  return kDType<T>;
}

template <class Device, class T>
bool attention_supports(const Context<Device>&, const Heads& heads) {
  return cuda_fuses_heads_of(heads.size);
}

#define FTBERT_INSTANTIATE(T)                                                                          \
  template Operand attention(Context<Cuda>&, const Heads&, const QueriesKeysValues&, const Sequences&, \
                             const ScorePolicy<T>&, const AttentionScratch&, const Operand&);          \
  template DType attention_operand<Cuda, T>(DType);                                                    \
  template bool attention_supports<Cuda, T>(const Context<Cuda>&, const Heads&);
FTBERT_CUDA_TYPES(FTBERT_INSTANTIATE)

}  // namespace ftbert
