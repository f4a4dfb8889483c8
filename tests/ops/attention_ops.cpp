// torch.ops.ftbert.*: the kernels of attention.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "binding/define_op.h"
#include "core/types.h"
#include "kernels/kernels.h"
#include "test_checks.h"

namespace ftbert::binding {
namespace {

// Keys on each side of a query that it sees; -1: all.
Window window_of(int64_t left, int64_t right) {
  count("left", left, -1, Window::kAll);
  count("right", right, -1, Window::kAll);
  const auto side = [](int64_t keys) { return keys < 0 ? Window::kAll : static_cast<int>(keys); };
  return {side(left), side(right)};
}

// table [heads, 2*span-1], or none: 0
int64_t span_of(const OptionalTensor& table, const Tensor& like, int64_t heads) {
  if (!table) return 0;
  FTBERT_CHECK(table->dim() == 2 && table->size(1) % 2 == 1, "relative_bias: expected [heads, 2*span-1], got ",
               describe(*table));
  same("relative_bias", table, like, {heads, table->size(1)});
  return (table->size(1) + 1) / 2;
}

// keys, queries [heads, head_size, stride] or none; rows int32 [2*reach+1], for distances -reach to reach.
class PositionTensors {
 public:
  PositionTensors(const OptionalTensor& keys, const OptionalTensor& queries, const OptionalTensor& rows,
                  const Tensor& like, const Heads& heads)
      : keys_(keys), queries_(queries), rows_(rows) {
    FTBERT_CHECK(rows.has_value() == (keys || queries), "position_rows: expected with tables, and with them alone");
    if (!rows) return;
    FTBERT_CHECK(rows->dim() == 1 && rows->size(0) % 2 == 1 && rows->scalar_type() == at::kInt &&
                     rows->device() == like.device() && rows->is_contiguous() && has_data(*rows),
                 "position_rows: expected contiguous Int [2*reach+1], got ", describe(*rows));
    stride_ = (keys ? keys : queries)->size(-1);
    reach_ = rows->size(0) / 2;
    FTBERT_CHECK(stride_ % PositionProducts<float>::kStep == 0, "positions: expected a stride of whole steps, got ",
                 stride_);
    same("position_keys", keys, like, {heads.count, heads.size, stride_});
    same("position_queries", queries, like, {heads.count, heads.size, stride_});
    FTBERT_CHECK(rows->min().item<int>() >= 0 && rows->max().item<int>() < stride_ &&
                     (rows->numel() == 1 || rows->diff().min().item<int>() >= 0),
                 "position_rows: expected rows of the tables, ascending");
    if (!rows->is_cuda()) return;
    stride_ = position_stride<Cuda>(0, reach_);
    const Tensor distances = at::arange(stride_, rows->options().dtype(at::kLong)).sub(stride_ / 2);
    const Tensor read = rows->index_select(0, distances.clamp(-reach_, reach_).add(reach_));
    for (OptionalTensor* table : {&keys_, &queries_})
      if (*table) *table = (*table)->index_select(2, read).transpose(1, 2).contiguous();
  }

  template <class T>
  PositionProducts<T> of(const OptionalTensor& columns) const {
    if (!rows_) return {};
    PositionProducts<T> made{data<T>(keys_), data<T>(queries_), stride_};
    made.reach = reach_;
    made.rows = data<int32_t>(rows_) + made.reach;
    made.columns = data<int32_t>(columns);
    const auto exact = [&](int64_t d) { return made.rows[d] == made.rows[0] + d && made.rows[-d] == made.rows[0] - d; };
    if (rows_->is_cpu())
      while (made.exact < made.reach && exact(made.exact + 1)) ++made.exact;
    return made;
  }

 private:
  OptionalTensor keys_, queries_, rows_;  // the tables as the device has them
  int64_t stride_ = 0, reach_ = 0;
};

template <class T>
ScorePolicy<T> policy_of(const Window& window, const OptionalTensor& table, const OptionalTensor& columns, int64_t span,
                         double soft_cap, const PositionProducts<T>& positions = {}) {
  return {window, {data<T>(table), data<int32_t>(columns), span}, {static_cast<float>(soft_cap)}, positions};
}

template <class Device, class T>
void check_fused(const Context<Device>& context, const Heads& heads, const ScorePolicy<T>& policy) {
  const std::string lacks = why_no_fused_attention<Device, T>(context, heads, policy.set());
  FTBERT_CHECK(lacks.empty(), "attention: the fused path ", lacks, "; the general path may take it");
}

Tensor attend(const Tensor& qkv, const Tensor& cu, int64_t max_seqlen, int64_t heads,
              const OptionalTensor& relative_bias, const OptionalTensor& columns, bool bf16, int64_t kv_heads,
              std::optional<double> scale, int64_t left, int64_t right, const OptionalTensor& out_scale,
              double soft_cap, const OptionalTensor& position_keys, const OptionalTensor& position_queries,
              const OptionalTensor& position_rows) {
  elements("qkv", qkv, 2);
  FTBERT_CHECK(!bf16 || qkv.is_cpu(), "bf16: operands are rounded on the CPU alone; elsewhere qkv itself may be bf16");
  const Heads h = heads_of(qkv, heads, kv_heads, scale);
  const Window window = window_of(left, right);
  const PositionTensors positions(position_keys, position_queries, position_rows, qkv, h);
  const int64_t span = span_of(relative_bias, qkv, heads);
  count("max_seqlen", max_seqlen, 0, kAnyLength);
  max_seqlen = std::min(max_seqlen, qkv.size(0));  // no sequence is longer than all
  const int64_t batch = check_offsets(cu, qkv, qkv.size(0), max_seqlen);
  check_columns(columns, cu, qkv.size(0));
  Tensor out = at::empty({qkv.size(0), h.width()}, qkv.options());
  // With a scale in e4m3, by whatever kernel: as in layers.
  const Tensor small = out_scale ? at::empty(out.sizes(), out.options().dtype(at::kFloat8_e4m3fn)) : out;
  const Operand scaled = out_scale ? scaled_e4m3("out", small, out_scale, qkv, out.sizes()) : Operand();
  run(qkv, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    const ScorePolicy<T> policy =
        policy_of<T>(window, relative_bias, columns, span, soft_cap, positions.of<T>(columns));
    check_fused<Device, T>(call.context, h, policy);
    const Tensor scratch = at::empty(
        {static_cast<int64_t>(attention_scratch_bytes<Device, T>(
            h, max_seqlen, AttentionUse::together, policy.template choose_by<ScoreMember::positions>().stride))},
        qkv.options().dtype(at::kByte));
    const DType read = attention_operand<Device, T>(bf16 ? formats::bf16 : *kFormat<T>);
    const Tensor given = read == kDType<T> ? qkv : qkv.to(at::kBFloat16);
    const Operand rows{const_cast<void*>(given.const_data_ptr()), &plain_format(read)};
    Sequences sequences = Sequences::of_tokens(data<int32_t>(cu), batch, max_seqlen, qkv.size(0));
    sequences.early = false;  // the offsets may have been written just now
    Operand wished = Operand::of(data<T>(out));
    if (scaled && !out.is_cpu()) wished = scaled, wished.data = out.data_ptr();
    const Operand made = attention<Device, T>(call.context, h, QueriesKeysValues::side_by_side(rows, h), sequences,
                                              policy, {scratch.data_ptr()}, wished);
    if (made.scaled())
      copy_on_device(call.context, made.data, scaled.data, small.nbytes());
    else if (scaled)
      quantise<Device, T>(call.context, data<T>(out), out.size(0), out.size(1), scaled);
  });
  return small;
}

// q [queries, heads * head_size], k and v [keys, kv_heads * head_size]: tensors of their own, or columns of one. Of
// each sequence the first max_q rows are computed. With end_k its keys are the rows [cu_k[i], end_k[i]).
Tensor attend_apart(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_q, const Tensor& cu_k,
                    int64_t max_q, int64_t heads, int64_t kv_heads, double scale, int64_t left, int64_t right,
                    const OptionalTensor& end_k, const OptionalTensor& relative_bias, double soft_cap,
                    const OptionalTensor& position_keys, const OptionalTensor& position_queries,
                    const OptionalTensor& position_rows) {
  count("heads", heads, 1);
  count("kv_heads", kv_heads, 1, heads);
  FTBERT_CHECK(q.dim() == 2 && q.size(1) % heads == 0 && heads % kv_heads == 0,
               "q: expected [queries, heads * head_size] and heads a multiple of kv_heads, got ", describe(q), " for ",
               heads, " heads and ", kv_heads, " of keys and values");
  const Heads h{heads, kv_heads, q.size(1) / heads, static_cast<float>(scale)};
  const auto rows = [&](const char* name, const Tensor& t, int64_t cols) {
    FTBERT_CHECK(t.dim() == 2 && t.size(1) == cols && t.stride(1) == 1 && t.scalar_type() == q.scalar_type() &&
                     t.device() == q.device() && has_data(t),
                 name, ": expected rows of ", cols, " contiguous elements like q's, got ", describe(t));
    return Rows{t.const_data_ptr(), t.stride(0)};
  };
  const Rows of_q = rows("q", q, h.width()), of_k = rows("k", k, h.kv_width()), of_v = rows("v", v, h.kv_width());
  FTBERT_CHECK(v.size(0) == k.size(0), "v: expected as many rows as k, got ", describe(v));
  const Window window = window_of(left, right);
  const PositionTensors positions(position_keys, position_queries, position_rows, q, h);
  const int64_t span = span_of(relative_bias, q, heads);
  count("max_q", max_q, 0);
  const int64_t batch = check_offsets(cu_q, q, q.size(0)), longest = std::max(q.size(0), k.size(0));
  end_k ? check_key_ranges(cu_k, *end_k, q, k.size(0), batch)
        : void(check_offsets(cu_k, q, k.size(0), kAnyLength, batch));
  Tensor out = at::empty(q.sizes(), q.options());
  run(q, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    const ScorePolicy<T> policy = policy_of<T>(window, relative_bias, {}, span, soft_cap, positions.of<T>({}));
    check_fused<Device, T>(call.context, h, policy);
    const AttentionUse use = max_q == 1 && end_k ? AttentionUse::decode : AttentionUse::together;
    const Tensor scratch = at::empty({static_cast<int64_t>(attention_scratch_bytes<Device, T>(
                                         h, longest, use, policy.template choose_by<ScoreMember::positions>().stride))},
                                     q.options().dtype(at::kByte));
    const int64_t arrivals = use == AttentionUse::decode ? attention_arrivals<Device>() : 0;
    const Tensor counted = at::zeros({arrivals}, q.options().dtype(at::kInt));
    const Sequences sequences{.cu_q = data<int32_t>(cu_q),
                              .cu_k = data<int32_t>(cu_k),
                              .count = batch,
                              .max_q = max_q,
                              .max_k = longest,
                              .rows = q.size(0),
                              .rows_k = k.size(0),
                              .early = false,
                              .end_k = data<int32_t>(end_k)};
    attention<Device, T>(call.context, h, {kDType<T>, of_q, of_k, of_v}, sequences, policy,
                         {scratch.data_ptr(), arrivals > 0 ? counted.mutable_data_ptr<int32_t>() : nullptr},
                         Operand::of(data<T>(out)));
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> qkv_bias(const Tensor& qkv, const OptionalTensor& bias, const Tensor& cu,
                                            int64_t seq, int64_t heads, int64_t kv_heads) {
  elements("qkv", qkv, 2);
  same("bias", bias, qkv, {qkv.size(1)});
  count("seq", seq, 0);
  const Heads h = heads_of(qkv, heads, kv_heads);
  const int64_t batch = check_offsets(cu, qkv, qkv.size(0), seq);
  const auto make = [&] { return at::empty({batch, heads, seq, h.size}, qkv.options()); };
  Tensor q = make(), k = make(), v = make();
  if (q.numel() == 0) return {q, k, v};
  run(qkv, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    add_qkv_bias<Device, T>(call.context, h, data<T>(qkv), data<T>(bias),
                            Sequences::of_tokens(data<int32_t>(cu), batch, seq, qkv.size(0)), data<T>(q), data<T>(k),
                            data<T>(v));
  });
  return {q, k, v};
}

Tensor softmax_op(const Tensor& scores, const Tensor& cu, double scale, const OptionalTensor& relative_bias,
                  const OptionalTensor& columns, at::ScalarType type, int64_t left, int64_t right, double soft_cap) {
  rank("scores", scores, 4);
  const int64_t batch = scores.size(0), heads = scores.size(1), seq = scores.size(3);
  FTBERT_CHECK(scores.scalar_type() == at::kFloat && scores.size(2) == seq,
               "scores: expected Float [batch, heads, seq, seq], got ", describe(scores));
  dtype_of(type);
  FTBERT_CHECK(type == at::kFloat || !scores.is_cpu(), "dtype: expected Float on the CPU, got ", at::toString(type));
  Tensor out = at::empty(scores.sizes(), scores.options().dtype(type));
  const int64_t span = span_of(relative_bias, out, heads);
  check_offsets(cu, scores, columns ? columns->numel() : std::numeric_limits<int32_t>::max(), seq, batch);
  check_columns(columns, cu, 0);
  if (out.numel() == 0) return out;
  count("heads", heads, 1);
  const Window window = window_of(left, right);
  run(out, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    softmax<Device, T>(call.context, {.count = heads, .scale = static_cast<float>(scale)}, data<float>(scores),
                       Sequences::of_tokens(data<int32_t>(cu), batch, seq, 0),
                       policy_of<T>(window, relative_bias, columns, span, soft_cap), data<T>(out));
  });
  return out;
}

Tensor position_products_op(const Tensor& scores, const Tensor& q, const Tensor& k, const Tensor& cu,
                            const OptionalTensor& columns, const OptionalTensor& position_keys,
                            const OptionalTensor& position_queries, const OptionalTensor& position_rows) {
  rank("scores", scores, 4);
  elements("q", q, 4);
  const int64_t batch = q.size(0), heads = q.size(1), seq = q.size(2);
  same("k", k, q, q.sizes());
  FTBERT_CHECK(scores.scalar_type() == at::kFloat && scores.sizes() == at::IntArrayRef({batch, heads, seq, seq}),
               "scores: expected Float [batch, heads, seq, seq], got ", describe(scores));
  const Heads h{heads, heads, q.size(3), 1};
  const PositionTensors positions(position_keys, position_queries, position_rows, q, h);
  check_offsets(cu, q, columns ? columns->numel() : std::numeric_limits<int32_t>::max(), seq, batch);
  check_columns(columns, cu, 0);
  Tensor out = scores.clone();
  run(q, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    add_position_products<Device, T>(call.context, h, data<T>(q), data<T>(k),
                                     Sequences::of_tokens(data<int32_t>(cu), batch, seq, 0), positions.of<T>(columns),
                                     data<float>(out));
  });
  return out;
}

Tensor transpose_op(const Tensor& x, const Tensor& cu, int64_t tokens) {
  elements("x", x, 4);
  count("tokens", tokens, 0);
  check_offsets(cu, x, tokens, x.size(2), x.size(0));
  count("heads", x.size(1), 0);
  count("head_size", x.size(3), 0);
  Tensor out = at::empty({tokens, x.size(1) * x.size(3)}, x.options());
  if (x.numel() == 0) return out;
  run(x, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    transpose<Device, T>(call.context, {.count = x.size(1), .size = x.size(3)}, data<T>(x),
                         Sequences::of_tokens(data<int32_t>(cu), x.size(0), x.size(2), tokens), data<T>(out));
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ftbert, m) {
  define_op(m,
            "attention(Tensor qkv, Tensor cu_seqlens, SymInt max_seqlen, int heads, Tensor? relative_bias=None, "
            "Tensor? columns=None, bool bf16=False, int kv_heads=0, float? scale=None, int left=-1, int right=-1, "
            "Tensor? out_scale=None, float soft_cap=0.0, Tensor? position_keys=None, Tensor? position_queries=None, "
            "Tensor? position_rows=None) -> Tensor",
            &attend);
  define_op(m,
            "attention_apart(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, SymInt max_q, int heads, int "
            "kv_heads, float scale, int left=-1, int right=-1, Tensor? end_k=None, Tensor? relative_bias=None, float "
            "soft_cap=0.0, Tensor? position_keys=None, Tensor? position_queries=None, Tensor? position_rows=None) -> "
            "Tensor",
            &attend_apart);
  define_op(m,
            "add_position_products(Tensor scores, Tensor q, Tensor k, Tensor cu_seqlens, Tensor? columns, Tensor? "
            "position_keys, Tensor? position_queries, Tensor? position_rows) -> Tensor",
            &position_products_op);
  define_op(m,
            "add_qkv_bias(Tensor qkv, Tensor? bias, Tensor cu_seqlens, SymInt seq, int heads, int kv_heads=0) -> "
            "(Tensor, Tensor, Tensor)",
            &qkv_bias);
  define_op(m,
            "softmax(Tensor scores, Tensor cu_seqlens, float scale, Tensor? relative_bias, Tensor? columns, "
            "ScalarType dtype, int left=-1, int right=-1, float soft_cap=0.0) -> Tensor",
            &softmax_op);
  define_op(m, "transpose(Tensor x, Tensor cu_seqlens, SymInt tokens) -> Tensor", &transpose_op);
}

}  // namespace ftbert::binding
