// How much memory a forward pass needs, and where in it everything lies.
#include "layers/encoder_buffers.h"

#include <algorithm>

#include "core/dispatch.h"
#include "gemm/own/wgmma_layernorm.h"
#include "kernels/kernels.h"
#include "layers/cpu_shares.h"

namespace ftbert {
namespace {

// The general path keeps [batch, heads, seq, seq] scores; it works on as many sequences at a time as fit in this.
constexpr int64_t kGeneralScoreElements = int64_t{1} << 26;

}  // namespace

template <class Device, class T>
int64_t Encoder<Device, T>::padded_rows(int64_t tokens) {
  return tokens + kGemmRowSlack<Device>;
}

template <class Device, class T>
auto Encoder<Device, T>::carve_scratch(Workspace& ws, const EncoderInput& input, int64_t pass, bool alone) const
    -> Scratch {
  const EncoderConfig& c = config_;
  const int64_t most = padded_rows(pass);
  Scratch b{};
  // Also where LayerNorms are folded: hooks and the last layer of first rows go kernel by kernel.
  if (may_fold<Device, T> && c.norm_place == NormPlace::post)
    b.norm_moments = {ws.take<uint64_t>(layernorm_moments(most)), layernorm_moments(most)};
  b.projected = ws.take<T>(most * c.hidden);
  if (on_cpu<Device>) b.context = ws.take<T>(most * c.hidden);  // still read where a later piece begins
  const size_t shared = ws.mark();
  b.qkv = ws.take<T>(most * 3 * c.hidden);
  if (!on_cpu<Device>) b.context = ws.take<T>(most * c.hidden);
  if (fused_) {
    b.attention_scratch = ws.take<char>(attention_scratch_bytes<Device, T>(input.max_seqlen, c.head_size, alone));
  } else {
    const int64_t per_sequence = std::max<int64_t>(1, c.heads * input.max_seqlen * input.max_seqlen);
    b.general_sequences =
        std::clamp<int64_t>(kGeneralScoreElements / per_sequence, 1, std::max<int64_t>(1, input.batch));
    const int64_t rows = b.general_sequences * input.max_seqlen;
    b.q = ws.take<T>(rows * c.hidden);
    b.k = ws.take<T>(rows * c.hidden);
    b.v = ws.take<T>(rows * c.hidden);
    b.scores = ws.take<float>(b.general_sequences * per_sequence);
    if constexpr (std::is_same_v<T, float>)
      b.probabilities = b.scores;
    else
      b.probabilities = ws.take<T>(b.general_sequences * per_sequence);
  }
  const size_t attention_end = ws.bytes();
  ws.release(shared);
  b.inner = ws.take<T>(most * c.inter);
  if (ws.bytes() < attention_end) ws.release(attention_end);
  return b;
}

template <class Device, class T>
auto Encoder<Device, T>::carve(const Context<Device>& context, Workspace& ws, const EncoderInput& input) const
    -> Buffers {
  const EncoderConfig& c = config_;
  // First rows go through the last layer all together; empty sequences make them more than tokens.
  const bool first = input.rows == OutputRows::first;
  const int64_t rows = std::max(input.tokens, first ? input.batch : 0);
  Buffers b{};
  if (!input.positions) b.positions = ws.take<int32_t>(input.tokens);
  if (c.relative_span > 0 && input.token_index) b.columns = ws.take<int32_t>(input.tokens);
  if (first) b.hidden = ws.take<T>(padded_rows(input.tokens) * c.hidden);
  if (first) b.first = ws.take<T>(padded_rows(input.batch) * c.hidden);
  if (c.embedding_projection) b.embedded = ws.take<T>(padded_rows(input.tokens) * c.embedding);
  if (c.norm_place == NormPlace::pre) b.normed = ws.take<T>(padded_rows(rows) * c.hidden);
  // The largest pass: one long sequence, or up to so many tokens of several.
  const auto pass = [&](int64_t most) {
    return on_cpu<Device> ? std::min(input.tokens, std::max(most, input.max_seqlen)) : input.tokens;
  };
  if constexpr (may_fold<Device, T>) {
    // Whether it is folded may depend on a table that changes between this and the call.
    if (folded_ && input.tokens <= folded_->most_tokens())
      b.folded_moments = ws.take<long long>(FoldedLayers<T>::moments_words(input.tokens));
  }
  const size_t shared = ws.mark();
  if constexpr (on_cpu<Device>) {
    const int64_t threads = fused_ ? context.gemm->threads() : 1;
    b.cuts = equal_shares(input.cu_seqlens, input.batch, input.tokens, threads);
    for (size_t i = 1; i < b.cuts.size(); ++i)
      b.shares.push_back(carve_scratch(ws, input, pass(share_pass_tokens(threads)), true));
  }
  const size_t shares_end = ws.bytes();
  ws.release(shared);
  static_cast<Scratch&>(b) = carve_scratch(ws, input, std::max(pass(kCpuPassTokens), first ? input.batch : 0), false);
  if (ws.bytes() < shares_end) ws.release(shares_end);
  return b;
}

template <class Device, class T>
size_t Encoder<Device, T>::workspace_bytes(const Context<Device>& context, const EncoderInput& input) const {
  Workspace measure;
  carve(context, measure, input);
  return measure.bytes();
}

#define FTBERT_INSTANTIATE(D, T)                                                                \
  template int64_t Encoder<D, T>::padded_rows(int64_t);                                         \
  template size_t Encoder<D, T>::workspace_bytes(const Context<D>&, const EncoderInput&) const; \
  template Encoder<D, T>::Buffers Encoder<D, T>::carve(const Context<D>&, Workspace&, const EncoderInput&) const;
FTBERT_BACKENDS(FTBERT_INSTANTIATE)

}  // namespace ftbert
