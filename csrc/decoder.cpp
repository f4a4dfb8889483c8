#include "decoder.h"

#include "core/check.h"
#include "core/device.h"
#include "core/dispatch.h"
#include "gemm/gemm.h"

namespace ftbert {

template <class Device, class T>
struct Decoder<Device, T>::Buffers {
  CachePlaces places;
  T* hidden;  // [rows_with_slack(output_rows), hidden]
  typename Encoder<Device, T>::Plan plan;
  char* of_encoder;
};

template <class Device, class T>
Decoder<Device, T>::Decoder(const Context<Device>& context, const Encoder<Device, T>& encoder, const Linear<T>& head,
                            const KvCache& cache)
    : encoder_(encoder), head_(head), cache_(cache) {
  FTBERT_CHECK(head.weight.k == encoder.config().hidden, "the head's weight: expected [vocab, ",
               encoder.config().hidden, "], got [", head.weight.n, ", ", head.weight.k, "]");
  check_product_exists(context, head_);
}

template <class Device, class T>
auto Decoder<Device, T>::carve(const Context<Device>& context, Workspace& ws, const Batch& batch) const -> Buffers {
  Buffers b{};
  b.places = {.rows = ws.take<int32_t>(batch.tokens()),
              .positions = ws.take<int32_t>(batch.tokens()),
              .begin_k = ws.take<int32_t>(batch.sequences.count),
              .end_k = ws.take<int32_t>(batch.sequences.count)};
  b.hidden = ws.take<T>(rows_with_slack<Device>(batch.output_rows()) * encoder_.config().hidden);
  b.plan = encoder_.plan(context, batch);
  b.of_encoder = ws.take<char>(static_cast<int64_t>(b.plan.bytes));
  return b;
}

template <class Device, class T>
size_t Decoder<Device, T>::bytes(const Context<Device>& context, const Batch& batch) const {
  Workspace measure;
  carve(context, measure, batch);
  return measure.bytes();
}

template <class Device, class T>
void Decoder<Device, T>::forward(Context<Device>& context, const Batch& tokens, const CacheSlots& slots,
                                 Workspace workspace, T* logits) const {
  const Buffers b = carve(context, workspace, tokens);
  const int64_t count = tokens.sequences.count, rows = tokens.output_rows();
  cache_places(context, slots, tokens.sequences.cu_q, count, tokens.tokens(), b.places);

  Batch batch = tokens;
  batch.positions = b.places.positions;
  batch.cache = &cache_;
  batch.cache_rows = b.places.rows;
  batch.sequences.cu_k = b.places.begin_k;
  batch.sequences.end_k = b.places.end_k;
  batch.sequences.first_k = 0;
  batch.sequences.rows_k = cache_.rows();
  encoder_.forward(context, batch, b.plan, Workspace(b.of_encoder, b.plan.bytes), b.hidden);
  const Operand made = linear_all(context, head_, Operand::of(b.hidden), rows, {.bias = true}, Operand::of(logits));
  if (made.data != logits) copy_on_device(context, made.as<T>(), logits, rows * head_.weight.n * sizeof(T));
  cache_grow(context, slots, count, b.places);  // last: after an error the slots hold what they held
}

#define FTBERT_INSTANTIATE(D, T) template class Decoder<D, T>;
FTBERT_BACKENDS(FTBERT_INSTANTIATE)

}  // namespace ftbert
