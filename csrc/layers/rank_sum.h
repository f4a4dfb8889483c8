// The sum of a shard's products over ranks, by the norm behind it or by the communicator.
#pragma once
#include "core/communicator.h"
#include "core/device.h"
#include "kernels/kernels.h"

namespace ftbert {

// add_bias_input_layernorm of x: rows (const T*), or the parts of a sum, for which ranks wait for each other.
template <class Device, class T, class Rows>
void norm_of(Context<Device>& context, Communicator<Device>* ranks, const Rows& x, const T* bias, const T* input,
             const Norm<T>& norm, int64_t rows, int64_t cols, const Output<T>& out) {
  const auto launch = [&] { add_bias_input_layernorm(context, x, bias, input, norm, rows, cols, out); };
  if constexpr (std::is_same_v<Rows, PartialSums<T>>)
    ranks->launch_together(context, launch);
  else
    launch();
}

// product(at) leaves a rank's part, [computed, cols], at `at` or elsewhere, and returns where. norms(x) gets the sum of
// the first `rows` rows: as the parts of all ranks, which its first norm adds up, or as rows at `memory`, where a
// kernel of their own or the communicator has added them up. turn: as of Communicator::parts.
template <class Device, class T, class Product, class Norms>
void with_sum_over_ranks(Context<Device>& context, Communicator<Device>& ranks, int turn, int64_t computed,
                         int64_t rows, int64_t cols, T* memory, const Product& product, const Norms& norms) {
  if constexpr (kNormsAddParts<Device>)
    if (const PeerParts all = ranks.parts(computed * cols * sizeof(T), turn)) {
      product(static_cast<T*>(all.parts[all.rank]));
      if (adds_parts<T>(cols)) return norms(PartialSums<T>{all});
      ranks.launch_together(context, [&] { all_reduce(context, all, rows * cols, memory); });
      return norms(static_cast<const T*>(memory));
    }
  const T* const part = product(memory);
  if (part != memory) copy_on_device(context, part, memory, rows * cols * sizeof(T));
  ranks.all_reduce(context, kDType<T>, memory, rows * cols);
  norms(static_cast<const T*>(memory));
}

}  // namespace ftbert
