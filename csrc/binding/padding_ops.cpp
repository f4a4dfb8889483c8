// torch.ops.ftbert.*: the kernels around padding, as kernel_ops.cpp has the others.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "binding/op_checks.h"
#include "core/types.h"
#include "kernels/kernels.h"

namespace ftbert::binding {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> padding(const Tensor& mask) {
  rank("mask", mask, 2);
  const at::ScalarType type = mask.scalar_type();
  FTBERT_CHECK(type == at::kBool || type == at::kByte || type == at::kLong || type == at::kFloat,
               "mask: expected Bool, Byte, Long or Float, got ", describe(mask));
  count("elements of mask", mask.numel(), 0);
  const int64_t batch = mask.size(0), rows = mask.numel();
  const auto options = mask.options();
  Tensor cu = at::empty({batch + 1}, options.dtype(at::kInt)), index = at::empty({rows}, options.dtype(at::kLong));
  Tensor packed = at::empty({rows}, options.dtype(at::kInt)), info = at::empty({5}, options.dtype(at::kLong));
  run_untyped(mask.device(), [&](auto backend, auto& context) {
    using Device = typename decltype(backend)::Device;
    PaddingInfo* to = reinterpret_cast<PaddingInfo*>(data<int64_t>(info));
    const auto go = [&]<class M>(M*) {
      padding_offsets<Device, M>(context, data<M>(mask), batch, mask.size(1), data<int32_t>(cu), data<int64_t>(index),
                                 data<int32_t>(packed), to);
    };
    if (type == at::kLong) return go(static_cast<int64_t*>(nullptr));
    if (type == at::kFloat) return go(static_cast<float*>(nullptr));
    go(static_cast<uint8_t*>(nullptr));
  });
  return {cu, index, packed, info};
}

Tensor padding_mask(const Tensor& lengths, int64_t seq) {
  integers("lengths", lengths, lengths, at::kInt, 0);
  count("seq", seq, 0);
  Tensor mask = at::empty({lengths.size(0), seq}, lengths.options().dtype(at::kByte));
  run_untyped(lengths.device(), [&](auto backend, auto& context) {
    padding_mask_from_lengths<typename decltype(backend)::Device>(context, data<int32_t>(lengths), lengths.size(0), seq,
                                                                  data<uint8_t>(mask));
  });
  return mask;
}

// cu_seqlens and token_index over ids [batch, seq], or cu_seqlens alone over packed ids; up to `tokens` of them.
void layout(const Tensor& ids, const OptionalTensor& token_index, const Tensor& cu, int64_t tokens) {
  FTBERT_CHECK(
      ids.dim() == (token_index ? 2 : 1) && ids.scalar_type() == at::kLong && ids.is_contiguous() && has_data(ids),
      "input_ids: expected contiguous Long ", token_index ? "[batch, seq]" : "[tokens]", ", got ", describe(ids));
  integers("cu_seqlens", cu, ids, at::kInt, 1);
  count("tokens", tokens, 0);
  check_offsets(cu, token_index ? tokens : std::min(tokens, ids.numel()));
  if (!token_index) return;
  FTBERT_CHECK(cu.size(0) == ids.size(0) + 1, "cu_seqlens: expected [", ids.size(0) + 1, "], got ", describe(cu));
  integers("token_index", *token_index, ids, at::kLong, tokens);
  check_token_index(*token_index, cu, ids.size(1));
}

Tensor positions(const Tensor& ids, const OptionalTensor& token_index, const Tensor& cu, int64_t tokens,
                 const std::string& kind, int64_t padding_id) {
  layout(ids, token_index, cu, tokens);
  count("padding_id", padding_id, 0);
  Tensor out = at::empty({tokens}, ids.options().dtype(at::kInt));
  FTBERT_CHECK(kind == "absolute" || kind == "from_padding", "kind: expected absolute or from_padding, got ", kind);
  run_untyped(ids.device(), [&](auto backend, auto& context) {
    padding_positions<typename decltype(backend)::Device>(
        context, kind == "absolute" ? PositionKind::absolute : PositionKind::from_padding, data<int64_t>(ids),
        data<int64_t>(token_index), data<int32_t>(cu), cu.size(0) - 1, ids.size(-1), padding_id, tokens,
        data<int32_t>(out));
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
  run_untyped(ids.device(), [&](auto backend, auto& context) {
    padding_stage<typename decltype(backend)::Device>(
        context, data<int64_t>(ids), data<int64_t>(types), data<int64_t>(token_index), data<int32_t>(cu), tokens, batch,
        ids.size(-1), most_tokens, most_batch, data<int64_t>(staged_ids), data<int64_t>(staged_types),
        data<int32_t>(columns), data<int32_t>(staged_cu));
  });
  return {staged_ids, staged_types, columns, staged_cu};
}

Tensor remove(const Tensor& padded, const Tensor& token_index, int64_t tokens) {
  rank("padded", padded, 2);
  elements("padded", padded);
  count("tokens", tokens, 0);
  integers("token_index", token_index, padded, at::kLong, tokens);
  check_range("token_index", token_index, tokens, 0, padded.size(0));
  Tensor out = at::empty({tokens, padded.size(1)}, padded.options());
  run(padded, [&](auto backend, auto& context) {
    using B = decltype(backend);
    remove_padding<typename B::Device, typename B::T>(context, data<typename B::T>(padded), data<int64_t>(token_index),
                                                      tokens, padded.size(1), data<typename B::T>(out));
  });
  return out;
}

Tensor restore(const Tensor& packed, const Tensor& packed_index) {
  rank("packed", packed, 2);
  elements("packed", packed);
  integers("packed_index", packed_index, packed, at::kInt, 0);
  check_range("packed_index", packed_index, packed_index.size(0), -1, packed.size(0));
  Tensor out = at::empty({packed_index.size(0), packed.size(1)}, packed.options());
  run(packed, [&](auto backend, auto& context) {
    using B = decltype(backend);
    restore_padding<typename B::Device, typename B::T>(context, data<typename B::T>(packed),
                                                       data<int32_t>(packed_index), packed_index.size(0),
                                                       packed.size(1), data<typename B::T>(out));
  });
  return out;
}

Tensor first(const Tensor& packed, const Tensor& cu) {
  rank("packed", packed, 2);
  elements("packed", packed);
  integers("cu_seqlens", cu, packed, at::kInt, 1);
  check_offsets(cu, packed.size(0));
  const int64_t batch = cu.size(0) - 1;
  Tensor out = at::empty({batch, packed.size(1)}, packed.options());
  run(packed, [&](auto backend, auto& context) {
    using T = typename decltype(backend)::T;
    first_rows<typename decltype(backend)::Device, T>(context, data<T>(packed), 0, data<int32_t>(cu), batch,
                                                      packed.size(1), data<T>(out));
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ftbert, m) {
  m.def("padding(Tensor mask) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("padding_mask(Tensor lengths, SymInt seq) -> Tensor");
  m.def(
      "padding_positions(Tensor input_ids, Tensor? token_index, Tensor cu_seqlens, SymInt tokens, str kind, int "
      "padding_id) -> Tensor");
  m.def(
      "padding_stage(Tensor input_ids, Tensor? token_type_ids, Tensor? token_index, Tensor cu_seqlens, SymInt tokens, "
      "SymInt most_tokens, SymInt most_batch) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("remove_padding(Tensor padded, Tensor token_index, SymInt tokens) -> Tensor");
  m.def("restore_padding(Tensor packed, Tensor packed_index) -> Tensor");
  m.def("first_rows(Tensor packed, Tensor cu_seqlens) -> Tensor");
}

#define FTBERT_PADDING_OPS(m)              \
  m.impl("padding", &padding);             \
  m.impl("padding_mask", &padding_mask);   \
  m.impl("padding_positions", &positions); \
  m.impl("padding_stage", &stage);         \
  m.impl("remove_padding", &remove);       \
  m.impl("restore_padding", &restore);     \
  m.impl("first_rows", &first)
TORCH_LIBRARY_IMPL(ftbert, CPU, m) { FTBERT_PADDING_OPS(m); }
TORCH_LIBRARY_IMPL(ftbert, CUDA, m) { FTBERT_PADDING_OPS(m); }

}  // namespace ftbert::binding
