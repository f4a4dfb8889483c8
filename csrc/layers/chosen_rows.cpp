// The last layer for the rows that are read: all of it that follows attention runs for them alone.
#include "core/dispatch.h"
#include "layers/attention.h"
#include "layers/layer_stack.h"

namespace ftbert {
namespace {

// The queries that the rows need. The last of each sequence can take the place of its first, for which kernels can
// stop, where a score does not depend on the place of its query; the general path computes all in any case.
template <class T>
Queries queries_of(RowKind rows, const Layer<T>& layer, AttentionPath path) {
  if (rows == RowKind::first) return Queries::first;
  const bool placeless = policy_of(layer).set().without({ScoreMember::soft_cap}) == ScoreMembers();
  return rows == RowKind::last && placeless && path == AttentionPath::fused ? Queries::last : Queries::all;
}

}  // namespace

template <class Device, class T>
void LayerStack<Device, T>::run_chosen_rows(Context<Device>& context, const Batch& batch, const std::vector<Run>& runs,
                                            LayerBuffers<T>& b, T* x, T* chosen, T* out) const {
  gather_rows<Device, T>(context, x, batch.sequences, batch.rows, config_.hidden, out);
  const int64_t last = config_.depth() - 1;
  if (last < 0) return;
  const Layer<T>& layer = weights_.layers[last];
  const int64_t width = layer.config.attention.heads.width();
  const Stream<Device, T> stream{x, b.normed};
  const Queries queries = queries_of(batch.rows.kind, layer, path_);
  const OutputRows attended = queries == Queries::all ? batch.rows : OutputRows{RowKind::first};
  for (const Run& run : runs) {
    attend(context, layer, batch, run, stream.from(run.first_token, config_.hidden), queries, path_, b,
           Operand::of(b.attended));
    // Rows of `any` may come from every run.
    T* const to = chosen + (attended.kind == RowKind::any ? 0 : run.first_sequence * width);
    gather_rows<Device, T>(context, b.attended, batch.of(run), attended, width, to);
  }
  Stream<Device, T> of_chosen{out, b.normed};
  finish(context, last, config_.depth(), Operand::of(chosen), batch.output_rows(), b, of_chosen, weights_.final_norm);
}

#define FTBERT_INSTANTIATE(D, T)                                                                      \
  template void LayerStack<D, T>::run_chosen_rows(Context<D>&, const Batch&, const std::vector<Run>&, \
                                                  LayerBuffers<T>&, T*, T*, T*) const;
FTBERT_BACKENDS(FTBERT_INSTANTIATE)

}  // namespace ftbert
