#include "binding/checked_input.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>
#include <type_traits>

namespace ftbert::binding {
namespace {

at::Tensor ids_tensor(const char* name, const at::Tensor& ids, int64_t dims, at::Device device,
                      const char* in_one_row = "[tokens]") {
  plain(name, ids);
  FTBERT_CHECK(ids.dim() == dims && (ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt), name,
               ": expected int64 or int32 ", dims == 2 ? "[batch, seq]" : in_one_row, ", got ", describe(ids));
  FTBERT_CHECK(ids.device() == device, name, ": the model is on ", device.str(), ", got ", describe(ids),
               "; move one to the other");
  return ids.to(at::kLong).contiguous();
}

std::optional<at::Tensor> type_tensor(const std::optional<at::Tensor>& types, const at::Tensor& ids,
                                      const ModelConfig& config) {
  // A model without token types ignores them, as transformers does.
  if (!types || config.token_types == 0) return std::nullopt;
  const at::Tensor checked = ids_tensor("token_type_ids", *types, ids.dim(), ids.device());
  FTBERT_CHECK(checked.sizes() == ids.sizes(), "token_type_ids: expected the shape of input_ids, got ",
               describe(*types), " for input_ids ", describe(ids));
  return checked;
}

// To the three element types that the kernel reads, without losing a value that is neither 0 nor 1.
at::Tensor mask_tensor(const at::Tensor& mask, const at::Tensor& ids) {
  plain("attention_mask", mask);
  FTBERT_CHECK(mask.dim() == 2 && mask.sizes() == ids.sizes(),
               "attention_mask: expected the shape of input_ids with values 0 and 1, got ", describe(mask),
               " for input_ids ", describe(ids));
  FTBERT_CHECK(mask.device() == ids.device() || mask.is_cpu(), "attention_mask: expected it on ", ids.device().str(),
               " or on the CPU, got ", describe(mask));
  const at::ScalarType type = mask.scalar_type();
  if (type == at::kBool || type == at::kByte || type == at::kLong || type == at::kFloat) return mask.contiguous();
  return mask.to(at::isFloatingType(type) ? at::kFloat : at::kLong).contiguous();
}

void check_length(const ModelConfig& config, int64_t length) {
  // Where a table has a bias for each distance between max_positions tokens, its ends are not those of further ones.
  const bool by_row = config.rotary() || config.relative_span >= config.max_positions;
  const bool any = config.positions == PositionKind::none && !by_row;
  FTBERT_CHECK(any || length <= config.max_seq(), "sequence of ", length, " tokens: the model has positions for ",
               config.max_seq(), "; truncate the input");
}

void check_info(const PaddingInfo& info, const ModelConfig& config, const CheckedInput& input) {
  const auto where = [&](int64_t one_based) {
    const int64_t index = one_based - 1, seq = input.input_ids.size(-1);
    return input.input_ids.dim() == 1 ? "[" + std::to_string(index) + "]"
                                      : "[" + std::to_string(index / seq) + ", " + std::to_string(index % seq) + "]";
  };
  const auto value = [](const at::Tensor& t, int64_t one_based) { return t.view(-1)[one_based - 1].item(); };
  if (info.bad_mask)
    fail("attention_mask: expected values 0 and 1, got ", value(input.mask, info.bad_mask).toDouble(), " at ",
         where(info.bad_mask));
  if (info.bad_id)
    fail("input_ids: expected ids in [0, ", config.vocab, "), the vocabulary, got ",
         value(input.input_ids, info.bad_id).toLong(), " at ", where(info.bad_id));
  if (info.bad_type)
    fail("token_type_ids: expected ids in [0, ", config.token_types, "), got ",
         value(*input.token_type_ids, info.bad_type).toLong(), " at ", where(info.bad_type));
  if (config.counts_tokens()) check_length(config, info.max_seqlen);
}

// Positions counted from padding count masked ids too: few kept tokens may stand at high ones. On the CPU.
void check_positions(const ModelConfig& config, const CheckedInput& input, int64_t tokens) {
  const int64_t batch = input.input_ids.size(0), seq = input.input_ids.size(1);
  if (!config.counts_tokens() || seq <= config.max_seq()) return;
  const at::Tensor positions = at::empty({tokens}, at::TensorOptions().dtype(at::kInt));
  CallContext<Cpu> cpu(at::kCPU);
  padding_positions<Cpu>(cpu.context, config.positions, data<int64_t>(input.input_ids), data<int64_t>(input.to_padded),
                         data<int32_t>(input.cu_seqlens), batch, seq, config.padding_id, tokens,
                         data<int32_t>(positions));
  const int32_t* const found = data<int32_t>(positions);
  for (int64_t t = 0; t < tokens; ++t) {
    if (found[t] < config.max_positions) continue;
    const int64_t at = data<int64_t>(input.to_padded)[t];
    fail("input_ids: the kept token at [", at / seq, ", ", at % seq, "] is number ", found[t] - config.padding_id,
         " of the ids there that are not the padding id ", config.padding_id,
         ", which count whether they are masked or not: the model has positions for ", config.max_seq(),
         "; put the padding id where the mask is 0, or truncate the input");
  }
}

// The wait leaves a GPU idle for some 40 us, in which an H200 computes about so much; and so few rows take hardly less
// than all of them (base 8x32, half full and full, 0.46 ms both). Only the shape may decide: what runs for a call must
// not depend on the calls before it.
constexpr double kWaitFlop = 24e9;
constexpr int64_t kFewRows = 256;

bool cheaper_than_waiting(const ModelConfig& c, int64_t rows) {
  double products = 0;
  for (const LayerConfig& layer : c.layers)
    products += 4.0 * c.hidden * (2.0 * static_cast<double>(layer.attention.heads.width()) + layer.ffn.inter);
  return rows <= kFewRows || rows * products <= kWaitFlop;
}

}  // namespace

template <class Device>
CheckedInput check_packed(Context<Device>& context, at::Device device, const ModelConfig& config,
                          const at::Tensor& input_ids, const at::Tensor& cu_seqlens, int64_t max_seqlen,
                          const std::optional<at::Tensor>& token_type_ids, at::Device offsets_on) {
  plain("cu_seqlens", cu_seqlens);
  FTBERT_CHECK(cu_seqlens.dim() == 1 && cu_seqlens.size(0) >= 1 && cu_seqlens.scalar_type() == at::kInt,
               "cu_seqlens: expected int32 [batch+1], got ", describe(cu_seqlens));
  FTBERT_CHECK(cu_seqlens.device() == offsets_on, "cu_seqlens: the model is on ", device.str(), ", got ",
               describe(cu_seqlens));
  CheckedInput out;
  out.input_ids = ids_tensor("input_ids", input_ids, 1, device);
  out.token_type_ids = type_tensor(token_type_ids, out.input_ids, config);
  out.cu_seqlens = cu_seqlens.contiguous();
  const int64_t tokens = input_ids.size(0), batch = cu_seqlens.size(0) - 1;
  FTBERT_CHECK(max_seqlen >= 0, "max_seqlen: expected at least the longest sequence, got ", max_seqlen);
  check_length(config, max_seqlen);
  FTBERT_CHECK(tokens <= std::numeric_limits<int32_t>::max(), "at most 2^31-1 tokens in one call, got ", tokens);
  if (device.is_cpu()) {
    const int32_t* cu = data<int32_t>(out.cu_seqlens);
    FTBERT_CHECK(cu[0] == 0 && cu[batch] == tokens, "cu_seqlens: expected it to run from 0 to ", tokens,
                 " (the number of input ids), got ", cu[0], " to ", cu[batch]);
    for (int64_t b = 0; b < batch; ++b)
      FTBERT_CHECK(cu[b + 1] >= cu[b] && cu[b + 1] - cu[b] <= max_seqlen,
                   "cu_seqlens: expected it never to fall and no step above max_seqlen ", max_seqlen, ", got ", cu[b],
                   " to ", cu[b + 1], " at sequence ", b);
    PaddingInfo info{};
    padding_check_ids<Device>(context, data<int64_t>(out.input_ids), data<int64_t>(out.token_type_ids), nullptr, cu,
                              batch, tokens, config.vocab, config.token_types, &info);
    check_info(info, config, out);
  }
  const int64_t longest = std::min(max_seqlen, tokens);  // no sequence is longer than all
  out.batch = {.sequences = Sequences::of_tokens(data<int32_t>(out.cu_seqlens), batch, longest, tokens),
               .ids = data<int64_t>(out.input_ids),
               .types = data<int64_t>(out.token_type_ids)};
  return out;
}

void CheckedInput::wait_for_count(const ModelConfig& config) {
  if (!counting) return;
  const PaddingInfo info = counting->wait();
  counting.reset();
  check_info(info, config, *this);
  batch.sequences.rows = batch.sequences.rows_k = info.tokens;
  batch.sequences.max_q = batch.sequences.max_k = info.max_seqlen;
}

template <class Device>
CheckedInput unpad(Context<Device>& context, at::Device device, const ModelConfig& config, const at::Tensor& input_ids,
                   const std::optional<at::Tensor>& attention_mask, const std::optional<at::Tensor>& token_type_ids,
                   Wait wait) {
  CheckedInput out;
  // Offsets have 32 bits, and a GPU fills them before the host knows their sum.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  FTBERT_CHECK(input_ids.numel() <= kMost, "input_ids: at most 2^31-1 tokens in one call, padding among them, got ",
               input_ids.numel());
  out.input_ids = ids_tensor("input_ids", input_ids, 2, device);
  out.token_type_ids = type_tensor(token_type_ids, out.input_ids, config);
  const int64_t batch = input_ids.size(0), seq = input_ids.size(1), rows = batch * seq;
  if (!config.counts_tokens() || config.rotary()) check_length(config, seq);
  FTBERT_CHECK(seq <= kMost, "input_ids: at most 2^31-1 columns, got ", seq);
  at::Tensor& mask = out.mask;
  if (attention_mask) mask = mask_tensor(*attention_mask, out.input_ids);
  // On the CPU, too: a replay copies the offsets again, from memory that may be somebody else's by then.
  if constexpr (std::is_same_v<Device, Cuda>)
    FTBERT_CHECK(!mask.defined() || !is_recording(context.stream), "attention_mask: its ones must be counted, which ",
                 "cannot be recorded in a CUDA graph; call forward_packed");

  // A mask on the CPU is counted by the host, and a GPU is not waited for.
  const at::Device counter = mask.defined() && mask.is_cpu() ? at::kCPU : device;
  // Pinned, so that the copies to the device do not wait for it.
  const auto options = at::TensorOptions().device(counter).pinned_memory(counter.is_cpu() && device.is_cuda());
  out.cu_seqlens = at::empty({batch + 1}, options.dtype(at::kInt));
  out.to_padded = at::empty({rows}, options.dtype(at::kLong));
  out.to_packed = at::empty({rows}, options.dtype(at::kInt));
  const auto find_all = [&](auto& on, PaddingInfo* target) {
    find_offsets(on, mask, batch, seq, out.cu_seqlens, out.to_padded, out.to_packed, target);
  };
  PaddingInfo info{};
  const auto check_ids = [&](PaddingInfo* target) {
    padding_check_ids<Device>(context, data<int64_t>(out.input_ids), data<int64_t>(out.token_type_ids),
                              data<int64_t>(out.to_padded), data<int32_t>(out.cu_seqlens), batch, rows, config.vocab,
                              config.token_types, target);
  };
  if (counter.is_cuda()) {
    info.tokens = rows;
    info.max_seqlen = batch ? seq : 0;
    if (!mask.defined()) {
      const at::Tensor unread = at::empty({kInfoWords}, at::TensorOptions().device(device).dtype(at::kLong));
      find_all(context, info_in(unread));
    } else if constexpr (std::is_same_v<Device, Cuda>) {
      out.counting = std::make_unique<PendingInfo>(context.stream);
      find_all(context, out.counting->info());
      check_ids(out.counting->info());
      out.counting->launched();
      // The one sync of the padded path: the host must know how many tokens there are.
      if (wait == Wait::first || !cheaper_than_waiting(config, rows)) {
        info = out.counting->wait();
        out.counting.reset();
      }
    }
  } else {
    CallContext<Cpu> cpu(at::kCPU, /*measures=*/device.is_cpu());
    find_all(cpu.context, &info);
    if (device.is_cuda()) {
      for (at::Tensor* counted : {&out.cu_seqlens, &out.to_padded, &out.to_packed})
        *counted = counted->to(device, /*non_blocking=*/true);
    } else {
      check_ids(&info);
    }
  }
  if (!out.counting) check_info(info, config, out);
  if (device.is_cpu()) check_positions(config, out, info.tokens);
  out.batch = {.sequences = Sequences::of_tokens(data<int32_t>(out.cu_seqlens), batch, info.max_seqlen, info.tokens),
               .ids = data<int64_t>(out.input_ids),
               .types = data<int64_t>(out.token_type_ids),
               .to_padded = data<int64_t>(out.to_padded),
               .seq = seq};
  return out;
}

void share_prefix(CheckedInput& input, int64_t prefix, int64_t max_seqlen) {
  FTBERT_CHECK(!input.padded(), "shared_prefix: expected packed ids, with cu_seqlens");
  Sequences& s = input.batch.sequences;
  FTBERT_CHECK(prefix > 0 && prefix <= s.rows && s.count > 0,
               "shared_prefix: expected the number of tokens of the first sequence, which all others begin with, got ",
               prefix);
  if (input.input_ids.is_cpu()) {
    FTBERT_CHECK(s.cu_q[1] == prefix, "shared_prefix: expected the ", s.cu_q[1],
                 " tokens of the first sequence, which all others begin with, got ", prefix);
    for (int64_t b = 1; b < s.count; ++b)
      FTBERT_CHECK(s.cu_q[b + 1] - s.cu_q[b] <= max_seqlen - prefix, "max_seqlen: expected at least the longest ",
                   "sequence with the prefix of ", prefix, " tokens, got ", max_seqlen, " for sequence ", b, " of ",
                   s.cu_q[b + 1] - s.cu_q[b], " more");
  }
  input.batch.shared_prefix = prefix;
  s.max_q = std::max(prefix, s.max_k - prefix);
}

void choose_rows(CheckedInput& input, const std::optional<at::Tensor>& rows) {
  FTBERT_CHECK(rows, "want: rows needs the argument rows, indices of packed tokens");
  input.rows = ids_tensor("rows", *rows, 1, input.input_ids.device(), "[n]");
  const int64_t* const index = data<int64_t>(input.rows);
  const int64_t count = input.rows.size(0), tokens = input.batch.tokens();
  for (int64_t i = 0; i < count && input.rows.is_cpu(); ++i)
    FTBERT_CHECK(index[i] >= 0 && index[i] < tokens, "rows: expected indices of packed tokens in [0, ", tokens,
                 "), got ", index[i], " at [", i, "]");
  FTBERT_CHECK(count == 0 || tokens > 0, "rows: there are no tokens, and so no rows of theirs");
  input.batch.rows = {.kind = RowKind::any, .index = index, .count = count};
}

void limit_keys(CheckedInput& input, const ModelConfig& config, const at::Tensor& keys) {
  FTBERT_CHECK(!input.padded(), "keys: expected packed ids, with cu_seqlens; of padded ones attention_mask says it");
  // ESM weighs words by how many are masked; DeBERTa's class makes the embeddings of such tokens zeros, which are no
  // keys' queries either, and mixes neighbours.
  const bool by_position = std::any_of(config.layers.begin(), config.layers.end(), [](const LayerConfig& layer) {
    return layer.attention.position_scores.has_value();
  });
  FTBERT_CHECK(!config.token_dropout && !by_position && !config.convolution,
               "keys: a token that is not attended to has no state of its own in this model (DeBERTa, ESM); expected "
               "all tokens to be keys");
  plain("keys", keys);
  Sequences& s = input.batch.sequences;
  FTBERT_CHECK(keys.dim() == 1 && keys.size(0) == s.count && keys.scalar_type() == at::kInt &&
                   keys.device() == input.cu_seqlens.device(),
               "keys: expected int32 [", s.count, "] on ", input.cu_seqlens.device().str(), ", got ", describe(keys));
  const at::Tensor counts = keys.contiguous();
  for (int64_t b = 0; b < s.count && counts.is_cpu(); ++b) {
    const int32_t given = data<int32_t>(counts)[b], tokens = s.cu_q[b + 1] - s.cu_q[b];
    FTBERT_CHECK(given >= 0 && given <= tokens, "keys: expected 0 to ", tokens, ", the tokens of sequence ", b,
                 ", got ", given);
  }
  input.end_k = at::add(input.cu_seqlens.narrow(0, 0, s.count), counts);
  s.end_k = data<int32_t>(input.end_k);
}

void take_hidden(CheckedInput& input, const at::Tensor& hidden, int64_t cols, DType dtype) {
  plain("hidden", hidden);
  const at::ScalarType type = scalar_type_of(dtype);
  const int64_t tokens = input.batch.tokens();
  FTBERT_CHECK(hidden.sizes() == at::IntArrayRef({tokens, cols}) && hidden.scalar_type() == type &&
                   hidden.is_contiguous() && hidden.device() == input.input_ids.device(),
               "hidden: expected contiguous ", at::toString(type), " [", tokens, ", ", cols, "] on ",
               input.input_ids.device().str(), ", got ", describe(hidden));
  input.hidden = hidden;
  input.batch.hidden = data<void>(hidden);
}

#define FTBERT_INSTANTIATE(D) FTBERT_INSTANTIATE_ONE(unpad<D>) FTBERT_INSTANTIATE_ONE(check_packed<D>)
FTBERT_DEVICES(FTBERT_INSTANTIATE)
#undef FTBERT_INSTANTIATE

}  // namespace ftbert::binding
