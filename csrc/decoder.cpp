#include "decoder.h"

#include "core/check.h"
#include "core/device.h"
#include "core/dispatch.h"
#include "gemm/gemm.h"

namespace ftbert {

template <class Device, class T>
struct Decoder<Device, T>::Buffers {
  CachePlaces places;
  T* hidden;  // [rows_with_slack(output_rows), hidden], where a head reads it
  char* of_encoder;
};

template <class Device, class T>
Decoder<Device, T>::Decoder(const Context<Device>& context, const Encoder<Device, T>& encoder, const Linear<T>& head,
                            const KvCache& cache)
    : encoder_(encoder), head_(head), cache_(cache) {
  if (!has_head()) return;
  FTBERT_CHECK(head.weight.k == encoder.config().hidden, "the head's weight: expected [vocab, ",
               encoder.config().hidden, "], got [", head.weight.n, ", ", head.weight.k, "]");
  check_product_exists(context, head_);
}

// With the cache; a sequence's only row is its last.
template <class Device, class T>
Batch Decoder<Device, T>::cached(const Batch& batch) const {
  Batch made = batch;
  made.cache = &cache_;
  if (batch.tokens() == batch.sequences.count && batch.rows.kind == RowKind::last) made.rows = {RowKind::all};
  return made;
}

template <class Device, class T>
auto Decoder<Device, T>::carve(Workspace& ws, const Batch& batch,
                               const typename Encoder<Device, T>::Plan& encoder) const -> Buffers {
  Buffers b{};
  b.places = {.rows = ws.take<int32_t>(batch.tokens()),
              .positions = ws.take<int32_t>(batch.tokens()),
              .begin_k = ws.take<int32_t>(batch.sequences.count),
              .end_k = ws.take<int32_t>(batch.sequences.count)};
  if (has_head()) b.hidden = ws.take<T>(rows_with_slack<Device>(batch.output_rows()) * encoder_.config().hidden);
  b.of_encoder = ws.take<char>(static_cast<int64_t>(encoder.bytes));
  return b;
}

template <class Device, class T>
auto Decoder<Device, T>::plan(const Context<Device>& context, const Batch& tokens) const -> Plan {
  const Batch batch = cached(tokens);
  Plan plan{encoder_.plan(context, batch)};
  Workspace measure;
  carve(measure, batch, plan.encoder);
  plan.bytes = measure.bytes();
  return plan;
}

template <class Device, class T>
void Decoder<Device, T>::forward(Context<Device>& context, const Batch& tokens, const CacheSlots& slots,
                                 const Plan& plan, Workspace workspace, T* out) const {
  Batch batch = cached(tokens);
  const Buffers b = carve(workspace, batch, plan.encoder);
  const int64_t count = batch.sequences.count, rows = batch.output_rows();
  cache_places(context, slots, batch.sequences.cu_q, count, batch.tokens(), b.places);
  batch.positions = b.places.positions;
  batch.cache_rows = b.places.rows;
  batch.sequences.cu_k = b.places.begin_k;
  batch.sequences.end_k = b.places.end_k;
  batch.sequences.first_k = 0;
  batch.sequences.rows_k = cache_.rows();
  T* const hidden = has_head() ? b.hidden : out;
  encoder_.forward(context, batch, plan.encoder, Workspace(b.of_encoder, plan.encoder.bytes), hidden);
  if (has_head()) {
    const Operand made = linear_all(context, head_, Operand::of(hidden), rows, {.bias = true}, Operand::of(out));
    if (made.data != out) copy_on_device(context, made.as<T>(), out, rows * head_.weight.n * sizeof(T));
  }
  cache_grow(context, slots, count, b.places);  // last: after an error the slots hold what they held
}

#define FTBERT_INSTANTIATE(D, T) template class Decoder<D, T>;
FTBERT_BACKENDS(FTBERT_INSTANTIATE)

}  // namespace ftbert
