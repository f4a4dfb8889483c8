// torch.ops.ftbert.*: the kernels around padding.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "binding/define_op.h"
#include "binding/padding.h"
#include "core/types.h"
#include "kernels/kernels.h"
#include "test_checks.h"

namespace ftbert::binding {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> padding(const Tensor& mask) {
  rank("mask", mask, 2);
  const at::ScalarType type = mask.scalar_type();
  FTBERT_CHECK(type == at::kBool || type == at::kByte || type == at::kLong || type == at::kFloat,
               "mask: expected Bool, Byte, Long or Float, got ", describe(mask));
  count("elements of mask", mask.numel(), 0);
  const auto make = [&](int64_t size, at::ScalarType of) { return at::empty({size}, mask.options().dtype(of)); };
  Tensor cu = make(mask.size(0) + 1, at::kInt), index = make(mask.numel(), at::kLong);
  Tensor packed = make(mask.numel(), at::kInt), info = make(kInfoWords, at::kLong);
  run(mask.device(), DType::fp32, [&]<class Device>(auto, CallContext<Device>& call) {
    find_offsets(call.context, mask, mask.size(0), mask.size(1), cu, index, packed, info_in(info));
  });
  return {cu, index, packed, info};
}

// cu_seqlens and token_index over ids [batch, seq], or cu_seqlens alone over packed ids; up to `tokens` of them.
void layout(const Tensor& ids, const OptionalTensor& token_index, const Tensor& cu, int64_t tokens) {
  FTBERT_CHECK(
      ids.dim() == (token_index ? 2 : 1) && ids.scalar_type() == at::kLong && ids.is_contiguous() && has_data(ids),
      "input_ids: expected contiguous Long ", token_index ? "[batch, seq]" : "[tokens]", ", got ", describe(ids));
  count("tokens", tokens, 0);
  if (!token_index) {
    check_offsets(cu, ids, std::min(tokens, ids.numel()));
    return;
  }
  check_offsets(cu, ids, tokens, kAnyLength, ids.size(0));
  integers("token_index", *token_index, ids, at::kLong, tokens);
  check_token_index(*token_index, cu, ids.size(1));
}

Tensor positions(const Tensor& ids, const OptionalTensor& token_index, const Tensor& cu, int64_t tokens,
                 const std::string& kind, int64_t padding_id) {
  layout(ids, token_index, cu, tokens);
  count("padding_id", padding_id, 0);
  Tensor out = at::empty({tokens}, ids.options().dtype(at::kInt));
  FTBERT_CHECK(kind == "absolute" || kind == "from_padding", "kind: expected absolute or from_padding, got ", kind);
  run(ids.device(), DType::fp32, [&]<class Device>(auto, CallContext<Device>& call) {
    padding_positions<Device>(call.context, kind == "absolute" ? PositionKind::absolute : PositionKind::from_padding,
                              data<int64_t>(ids), data<int64_t>(token_index), data<int32_t>(cu), cu.size(0) - 1,
                              ids.size(-1), padding_id, tokens, data<int32_t>(out));
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> stage(const Tensor& ids, const OptionalTensor& types,
                                                 const OptionalTensor& token_index, const Tensor& cu, int64_t tokens,
                                                 int64_t most_tokens, int64_t most_batch) {
  layout(ids, token_index, cu, tokens);
  const int64_t batch = cu.size(0) - 1;
  same("token_type_ids", types, ids, ids.sizes());
  if (!token_index) count("tokens", tokens, 0, ids.numel());
  count("most_tokens", most_tokens, tokens);
  count("most_batch", most_batch, batch, std::numeric_limits<int32_t>::max() - 1);
  Tensor staged_ids = at::empty({most_tokens}, ids.options()), staged_types = at::empty_like(staged_ids);
  Tensor columns = at::empty({most_tokens}, cu.options()), staged_cu = at::empty({most_batch + 1}, cu.options());
  run(ids.device(), DType::fp32, [&]<class Device>(auto, CallContext<Device>& call) {
    padding_stage<Device>(call.context, data<int64_t>(ids), data<int64_t>(types), data<int64_t>(token_index),
                          data<int32_t>(cu), tokens, batch, ids.size(-1), most_tokens, most_batch,
                          data<int64_t>(staged_ids), data<int64_t>(staged_types), data<int32_t>(columns),
                          data<int32_t>(staged_cu));
  });
  return {staged_ids, staged_types, columns, staged_cu};
}

Tensor gather(const Tensor& packed, const Tensor& cu, const std::string& kind, const OptionalTensor& index) {
  elements("packed", packed, 2);
  const int64_t batch = check_offsets(cu, packed, packed.size(0));
  OutputRows rows{kind == "last" ? RowKind::last : RowKind::first};
  if (index) {
    FTBERT_CHECK(kind == "any", "kind: expected any beside rows, got ", kind);
    integers("rows", *index, packed, at::kLong, 0);
    if (cu.is_cpu()) check_range("rows", *index, index->size(0), 0, data<int32_t>(cu)[batch]);
    rows = {RowKind::any, data<int64_t>(index), index->size(0)};
  } else {
    FTBERT_CHECK(kind == "first" || kind == "last", "kind: expected first or last, or any with rows, got ", kind);
  }
  const Sequences sequences = Sequences::of_tokens(data<int32_t>(cu), batch, 0, packed.size(0));
  Tensor out = at::empty({rows.of(sequences), packed.size(1)}, packed.options());
  run(packed, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    gather_rows<Device, T>(call.context, data<T>(packed), sequences, rows, packed.size(1), data<T>(out));
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ftbert, m) {
  define_op(m, "padding(Tensor mask) -> (Tensor, Tensor, Tensor, Tensor)", &padding);
  define_op(m,
            "padding_positions(Tensor input_ids, Tensor? token_index, Tensor cu_seqlens, SymInt tokens, str kind, int "
            "padding_id) -> Tensor",
            &positions);
  define_op(m,
            "padding_stage(Tensor input_ids, Tensor? token_type_ids, Tensor? token_index, Tensor cu_seqlens, SymInt "
            "tokens, SymInt most_tokens, SymInt most_batch) -> (Tensor, Tensor, Tensor, Tensor)",
            &stage);
  define_op(m, "gather_rows(Tensor packed, Tensor cu_seqlens, str kind, Tensor? rows=None) -> Tensor", &gather);
}

}  // namespace ftbert::binding
