// The cosines and sines of a model's rotary positions.
#include <algorithm>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/dispatch.h"
#include "kernels/kernels.h"
#include "layers/prepared.h"

namespace ftbert {

template <class Device, class T>
Weights<T> with_rotary_tables(const Context<Device>& context, const ModelConfig& config, Weights<T> weights,
                              const AllocateFloats& allocate) {
  Context<Device> on = context;
  std::vector<std::pair<const Rotary*, Rotation>> made;
  for (int64_t i = 0; i < config.depth(); ++i) {
    const std::optional<Rotary>& asked = config.layers[i].attention.rotary;
    if (!asked) continue;
    auto found = std::find_if(made.begin(), made.end(), [&](const auto& one) { return *one.first == *asked; });
    if (found == made.end()) {
      FTBERT_CHECK(allocate, "rotary positions need memory for their table");
      const int64_t rows = asked->stretch ? 1 : config.max_positions;  // those of a batch are made with it
      float* const table = allocate(rows * asked->dims);
      rotary_table<Device>(on, asked->frequencies.data(), asked->dims / 2, asked->amplitude, rows, table);
      found = made.insert(made.end(), {&*asked, {table, rows, asked->dims, asked->interleaved}});
    }
    weights.layers[i].rotation = found->second;
  }
  return weights;
}

#define FTBERT_INSTANTIATE(D, T) \
  template Weights<T> with_rotary_tables(const Context<D>&, const ModelConfig&, Weights<T>, const AllocateFloats&);
FTBERT_BACKENDS(FTBERT_INSTANTIATE)

}  // namespace ftbert
