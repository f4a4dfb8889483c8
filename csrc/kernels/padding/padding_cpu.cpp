// Offsets and index maps of the valid tokens, and rows of packed tokens: back into the padded layout, or some of them.
#include <algorithm>
#include <cstring>
#include <limits>

#include "device/parallel_cpu.h"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

template <class M>
void offsets(const M* mask, int64_t batch, int64_t seq, int32_t* cu_seqlens, int64_t* to_padded, int32_t* to_packed,
             PaddingInfo* info) {
  *info = {};
  int64_t tokens = 0;
  for (int64_t b = 0; b < batch; ++b) {
    cu_seqlens[b] = static_cast<int32_t>(tokens);
    const int64_t start = tokens;
    for (int64_t row = b * seq; row < (b + 1) * seq; ++row) {
      const M value = mask ? mask[row] : M(1);
      if (value == M(0)) {
        to_packed[row] = -1;
        continue;
      }
      if (value != M(1) && !info->bad_mask) info->bad_mask = 1 + row;
      to_packed[row] = static_cast<int32_t>(tokens);
      to_padded[tokens++] = row;
    }
    info->max_seqlen = std::max(info->max_seqlen, tokens - start);
  }
  cu_seqlens[batch] = static_cast<int32_t>(tokens);
  info->tokens = tokens;
  std::fill(to_padded + tokens, to_padded + batch * seq, 0);
}

}  // namespace

#define FTBERT_INSTANTIATE(M)                                                                                 \
  template <>                                                                                                 \
  void padding_offsets<Cpu, M>(Context<Cpu>&, const M* mask, int64_t batch, int64_t seq, int32_t* cu_seqlens, \
                               int64_t* to_padded, int32_t* to_packed, PaddingInfo* info) {                   \
    offsets(mask, batch, seq, cu_seqlens, to_padded, to_packed, info);                                        \
  }
FTBERT_INSTANTIATE(uint8_t)
FTBERT_INSTANTIATE(int64_t)
FTBERT_INSTANTIATE(float)
#undef FTBERT_INSTANTIATE

template <>
void padding_check_ids<Cpu>(Context<Cpu>&, const int64_t* input_ids, const int64_t* token_type_ids,
                            const int64_t* to_padded, const int32_t* cu_seqlens, int64_t batch, int64_t most,
                            int64_t vocab, int64_t token_types, PaddingInfo* info) {
  const int64_t tokens = std::min<int64_t>(most, cu_seqlens[batch]);
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t source = to_padded ? to_padded[t] : t;
    if (!info->bad_id && (input_ids[source] < 0 || input_ids[source] >= vocab)) info->bad_id = 1 + source;
    if (token_type_ids && !info->bad_type && (token_type_ids[source] < 0 || token_type_ids[source] >= token_types))
      info->bad_type = 1 + source;
  }
}

template <>
void padding_positions<Cpu>(Context<Cpu>&, PositionKind kind, const int64_t* input_ids, const int64_t* to_padded,
                            const int32_t* cu_seqlens, int64_t batch, int64_t seq, int64_t padding_id, int64_t most,
                            int32_t* positions) {
  std::fill(positions + cu_seqlens[batch], positions + most, 0);
#pragma omp parallel for schedule(static) if (cu_seqlens[batch] > kSerialElements)
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t begin = cu_seqlens[b], end = cu_seqlens[b + 1];
    if (kind != PositionKind::from_padding) {
      for (int64_t t = begin; t < end; ++t)
        positions[t] = static_cast<int32_t>(to_padded ? to_padded[t] - b * seq : t - begin);
      continue;
    }
    // transformers' create_position_ids_from_input_ids counts every id that is not padding, masked or not.
    int64_t count = 0, next = to_padded ? b * seq : begin;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t source = to_padded ? to_padded[t] : t;
      for (; next <= source; ++next) count += input_ids[next] != padding_id;
      const int64_t position = padding_id + (input_ids[source] == padding_id ? 0 : count);
      positions[t] = static_cast<int32_t>(std::min<int64_t>(position, std::numeric_limits<int32_t>::max()));
    }
  }
}

template <>
void token_factors<Cpu>(Context<Cpu>&, const int64_t* input_ids, const int64_t* to_padded, const int32_t* cu_seqlens,
                        int64_t batch, int64_t mask_id, float kept, int64_t most, float* factors) {
  std::fill(factors + cu_seqlens[batch], factors + most, 0.0f);
#pragma omp parallel for schedule(static) if (cu_seqlens[batch] > kSerialElements)
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t begin = cu_seqlens[b], end = cu_seqlens[b + 1];
    const auto masked = [&](int64_t t) { return input_ids[to_padded ? to_padded[t] : t] == mask_id; };
    int64_t count = 0;
    for (int64_t t = begin; t < end; ++t) count += masked(t);
    const float share = static_cast<float>(count) / static_cast<float>(end - begin);
    for (int64_t t = begin; t < end; ++t) factors[t] = masked(t) ? 0.0f : kept / (1.0f - share);
  }
}

template <>
void padding_stage<Cpu>(Context<Cpu>& context, const int64_t* input_ids, const int64_t* token_type_ids,
                        const int64_t* to_padded, const int32_t* cu_seqlens, int64_t tokens, int64_t batch, int64_t seq,
                        int64_t most_tokens, int64_t most_batch, int64_t* staged_ids, int64_t* staged_types,
                        int32_t* columns, int32_t* staged_cu_seqlens) {
  tokens = std::min<int64_t>(tokens, cu_seqlens[batch]);
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t source = to_padded ? to_padded[t] : t;
    staged_ids[t] = input_ids[source];
    staged_types[t] = token_type_ids ? token_type_ids[source] : 0;
  }
  std::fill(staged_ids + tokens, staged_ids + most_tokens, 0);
  std::fill(staged_types + tokens, staged_types + most_tokens, 0);
  if (columns)
    padding_positions(context, PositionKind::absolute, input_ids, to_padded, cu_seqlens, batch, seq, 0, most_tokens,
                      columns);
  for (int64_t b = 0; b <= most_batch; ++b) staged_cu_seqlens[b] = cu_seqlens[std::min(b, batch)];
}

template <>
void restore_padding<Cpu, float>(Context<Cpu>&, const float* packed, const int32_t* to_packed, int64_t rows,
                                 int64_t cols, float* padded) {
#pragma omp parallel for schedule(static) if (rows * cols > kSerialElements)
  for (int64_t r = 0; r < rows; ++r) {
    if (to_packed[r] < 0)
      std::memset(padded + r * cols, 0, cols * sizeof(float));
    else
      std::memcpy(padded + r * cols, packed + to_packed[r] * cols, cols * sizeof(float));
  }
}

template <>
void gather_rows<Cpu, float>(Context<Cpu>&, const float* packed, const Sequences& sequences, const OutputRows& rows,
                             int64_t cols, float* out) {
  const int32_t* const cu = sequences.cu_q;
  const int64_t begin = cu[0], end = cu[sequences.count];
  const int64_t count = rows.of(sequences);
#pragma omp parallel for schedule(static) if (count * cols > kSerialElements)
  for (int64_t i = 0; i < count; ++i) {
    float* const to = out + i * cols;
    const int64_t token = rows.kind == RowKind::any     ? rows.index[i]
                          : rows.kind == RowKind::first ? cu[i]
                                                        : int64_t{cu[i + 1]} - 1;
    if (rows.kind != RowKind::any && cu[i] == cu[i + 1])
      std::memset(to, 0, cols * sizeof(float));
    else if (token >= begin && token < end)
      std::memcpy(to, packed + (token - sequences.first_q) * cols, cols * sizeof(float));
  }
}

template <>
void last_rows_to_first<Cpu, float>(Context<Cpu>&, const Sequences& sequences, DType dtype, int64_t cols,
                                    int64_t stride, void* x) {
  const int64_t bytes = bytes_of(dtype);
  const auto row = [&](int64_t token) { return static_cast<char*>(x) + (token - sequences.first_q) * stride * bytes; };
  for (int64_t i = 0; i < sequences.count; ++i) {
    const int64_t first = sequences.cu_q[i], last = int64_t{sequences.cu_q[i + 1]} - 1;
    if (first < last) std::memcpy(row(first), row(last), cols * bytes);
  }
}

template <>
void zero_empty_rows<Cpu, float>(Context<Cpu>&, const int32_t* cu_seqlens, int64_t batch, int64_t cols, float* x) {
  for (int64_t b = 0; b < batch; ++b)
    if (cu_seqlens[b] == cu_seqlens[b + 1]) std::memset(x + b * cols, 0, cols * sizeof(float));
}

}  // namespace ftbert
