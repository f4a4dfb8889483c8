#include "layers/positions.h"

#include "core/dispatch.h"
#include "kernels/kernels.h"

namespace ftbert {

Positions Positions::take(Workspace& workspace, const ModelConfig& config, int64_t tokens, bool padded) {
  // Packed tokens stand in the columns of their sequences, by which scores know distances.
  const bool columns =
      ((config.by_distance() || config.convolution) && padded) || (config.rotary() && config.counts_tokens());
  Positions made;
  made.ids = workspace.take<int32_t>(tokens);
  if (columns) made.columns = config.counts_tokens() ? workspace.take<int32_t>(tokens) : made.ids;
  return made;
}

template <class Device>
void find_positions(Context<Device>& context, const ModelConfig& config, const Batch& batch, int64_t most,
                    const Positions& positions) {
  const auto find = [&](PositionKind kind, int32_t* out) {
    padding_positions<Device>(context, kind, batch.ids, batch.to_padded, batch.sequences.cu_q, batch.sequences.count,
                              batch.seq, config.padding_id, most, out);
  };
  find(config.positions, positions.ids);
  if (positions.columns && positions.columns != positions.ids) find(PositionKind::absolute, positions.columns);
}

#define FTBERT_INSTANTIATE(D) \
  template void find_positions(Context<D>&, const ModelConfig&, const Batch&, int64_t, const Positions&);
FTBERT_DEVICES(FTBERT_INSTANTIATE)

}  // namespace ftbert
