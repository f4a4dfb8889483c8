// torch.ops.ftbert.*: the kernels that heads, pooling and sampling call by themselves. The ops of all other kernels are
// in tests/ops/, a library that tests and benchmarks load. Fakes are in ftbert/_fake.py.
#include <ATen/ops/empty.h>

#include "binding/define_op.h"
#include "binding/op_checks.h"
#include "core/types.h"
#include "kernels/kernels.h"

namespace ftbert::binding {
namespace {

// With a scale in e4m3.
Tensor bias_act(const Tensor& x, const OptionalTensor& bias, const std::string& activation,
                const OptionalTensor& scale) {
  elements("x", x, 2);
  same("bias", bias, x, {x.size(1)});
  const Activation act = parse_activation(activation);
  const Tensor out = x.clone();
  const Tensor small = scale ? at::empty(x.sizes(), x.options().dtype(at::kFloat8_e4m3fn)) : out;
  const Operand to = scale ? scaled_e4m3("out", small, scale, x, x.sizes()) : Operand();
  if (x.numel() == 0) return small;
  run(x, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    add_bias_act<Device, T>(call.context, data<T>(out), data<T>(bias), act, x.size(0), x.size(1), to);
  });
  return small;
}

Tensor restore_op(const Tensor& packed, const Tensor& packed_index) {
  elements("packed", packed, 2);
  integers("packed_index", packed_index, packed, at::kInt, 0);
  check_range("packed_index", packed_index, packed_index.size(0), -1, packed.size(0));
  Tensor out = at::empty({packed_index.size(0), packed.size(1)}, packed.options());
  run(packed, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    restore_padding<Device, T>(call.context, data<T>(packed), data<int32_t>(packed_index), packed_index.size(0),
                               packed.size(1), data<T>(out));
  });
  return out;
}

Tensor pooling_op(const Tensor& hidden, const OptionalTensor& cu, const std::string& mode, bool normalize) {
  elements("hidden", hidden, 2);
  const PoolingMode pooling_mode = parse_pooling(mode);
  const int64_t batch = cu ? check_offsets(*cu, hidden, hidden.size(0)) : hidden.size(0), cols = hidden.size(1);
  Tensor out = at::empty({batch, cols}, hidden.options().dtype(at::kFloat));
  run(hidden, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    pooling<Device, T>(call.context, data<T>(hidden), data<int32_t>(cu), batch, cols, pooling_mode, normalize,
                       data<float>(out));
  });
  return out;
}

// logits [rows, vocab] -> int64 [rows], -1 where a row's largest number is no finite one.
Tensor argmax_op(const Tensor& logits) {
  elements("logits", logits, 2);
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  count("vocab", vocab, 1);
  const Tensor ids = at::empty({rows}, logits.options().dtype(at::kLong));
  if (rows == 0) return ids;
  run(logits, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    argmax<Device, T>(call.context, data<T>(logits), rows, vocab, data<int64_t>(ids));
  });
  return ids;
}

// queries [query tokens, width], documents [document tokens, width] of one type, each with the offsets of its vectors
// -> float [queries, documents], or with query_of int32 [documents], each one's query, [documents].
Tensor max_sim_op(const Tensor& queries, const Tensor& cu_queries, const Tensor& documents, const Tensor& cu_documents,
                  const OptionalTensor& query_of) {
  const at::ScalarType type = queries.scalar_type();
  rank("queries", queries, 2);
  FTBERT_CHECK(is_element(type) || type == at::kChar,
               "queries: expected float32, float16, bfloat16 or int8 [tokens, width], got ", describe(queries));
  rank("documents", documents, 2);
  FTBERT_CHECK(
      documents.scalar_type() == type && documents.size(1) == queries.size(1) && documents.device() == queries.device(),
      "documents: expected ", at::toString(type), " [tokens, ", queries.size(1), "] on ", queries.device().str(),
      " like the queries, got ", describe(documents));
  count("width", queries.size(1), 1);
  const int64_t of_queries = check_offsets(cu_queries, queries, queries.size(0)),
                of_documents = check_offsets(cu_documents, documents, documents.size(0));
  same("query_of", query_of, cu_queries, {of_documents});
  if (query_of) check_range("query_of", *query_of, of_documents, 0, of_queries);
  const MaxSim of{.dtype = type == at::kChar ? DType::int8 : dtype_of(type),
                  .queries = data<void>(queries),
                  .documents = data<void>(documents),
                  .cu_queries = data<int32_t>(cu_queries),
                  .cu_documents = data<int32_t>(cu_documents),
                  .query_of = data<int32_t>(query_of),
                  .query_count = of_queries,
                  .document_count = of_documents,
                  .width = queries.size(1)};
  const auto options = queries.options();
  const Tensor scores = query_of ? at::empty({of_documents}, options.dtype(at::kFloat))
                                 : at::empty({of_queries, of_documents}, options.dtype(at::kFloat));
  if (scores.numel() == 0) return scores;
  run(queries.device(), DType::fp32, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    const auto bytes = static_cast<int64_t>(max_sim_scratch_bytes<Device>(of));
    const Tensor scratch = at::empty({bytes}, options.dtype(at::kByte));
    max_sim<Device>(call.context, of, scratch.data_ptr(), data<float>(scores));
  });
  return scores;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ftbert, m) {
  define_op(m, "add_bias_act(Tensor x, Tensor? bias, str activation, Tensor? scale=None) -> Tensor", &bias_act);
  define_op(m, "restore_padding(Tensor packed, Tensor packed_index) -> Tensor", &restore_op);
  define_op(m, "pooling(Tensor hidden, Tensor? cu_seqlens, str mode, bool normalize) -> Tensor", &pooling_op);
  define_op(m,
            "max_sim(Tensor queries, Tensor cu_queries, Tensor documents, Tensor cu_documents, Tensor? query_of=None) "
            "-> Tensor",
            &max_sim_op);
  define_op(m, "argmax(Tensor logits) -> Tensor", &argmax_op);
}

}  // namespace ftbert::binding
