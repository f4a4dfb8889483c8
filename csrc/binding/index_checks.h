// What the index tensors of an op hold. Looked at on the CPU only: elsewhere the host would have to wait for it.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <optional>

namespace ftbert::binding {

inline constexpr int64_t kAnyLength = std::numeric_limits<int64_t>::max();

// cu_seqlens int32 [batch+1]: from 0, never falling, to at most `rows`, by at most `longest` at a time.
void check_offsets(const at::Tensor& cu_seqlens, int64_t rows, int64_t longest = kAnyLength);

// Elements [0, count) of an int32 or int64 vector, or those that `at` [count] names: low <= x < end.
void check_range(const char* name, const at::Tensor& indices, int64_t count, int64_t low, int64_t end,
                 const int64_t* at = nullptr);

// token_index int64: tokens cu_seqlens[b] to cu_seqlens[b+1] lie in row b of [batch, seq], in rising columns.
void check_token_index(const at::Tensor& token_index, const at::Tensor& cu_seqlens, int64_t seq);

// columns int32, or none: not negative and rising within each sequence.
void check_columns(const std::optional<at::Tensor>& columns, const at::Tensor& cu_seqlens);

}  // namespace ftbert::binding
