// What the ops of tests alone check beside binding/op_checks.h.
#pragma once
#include "binding/op_checks.h"

namespace ftbert::binding {

// begin and end int32 [batch]: of each sequence rows [begin, end) of `rows`; they may overlap.
void check_key_ranges(const Tensor& begin, const Tensor& end, const Tensor& like, int64_t rows, int64_t batch);

// token_index int64: tokens cu_seqlens[b] to cu_seqlens[b+1] lie in row b of [batch, seq], in rising columns.
void check_token_index(const Tensor& token_index, const Tensor& cu_seqlens, int64_t seq);

// columns int32, or none: at least so many, not negative and rising within each sequence.
void check_columns(const OptionalTensor& columns, const Tensor& cu_seqlens, int64_t least);

// Where an op stores byte rows of [rows, cols] numbers beside like's: out uint8 [rows, byte_row_bytes(cols)], smooth
// [cols] or none.
Operand byte_rows(const char* name, const Tensor& out, const OptionalTensor& smooth, const Tensor& like, int64_t rows,
                  int64_t cols);

// A copy of a [m, k] at an address like its own, on a GPU with NaN in the rows behind it up to the end of a tile
// (gemm/product.h).
Tensor in_tiles(const Tensor& a);

// Of a product: a [m, k], weight [n, k], n and k not 0; bias [n].
void operands(const Tensor& a, const Tensor& weight, const OptionalTensor& bias);

// The same of a weight in q8_0: int8 [n, k] with scales fp16 [n, k / 32].
void q8_0_operands(const Tensor& a, const Tensor& weight, const Tensor& scales, const OptionalTensor& bias);

// One scale, or one for each row. -> which of them
const Format& scales(const char* name, const Tensor& t, const Tensor& like, int64_t rows);
// The same of matrices in E4M3 with their scales, a bias in dtype. -> how many scales the weight has
const Format& e4m3_operands(const Tensor& a, const Tensor& a_scale, const Tensor& weight, const Tensor& weight_scale,
                            const OptionalTensor& bias, at::ScalarType dtype);

// qkv [tokens, (heads + 2*kv_heads) * head_size]; kv_heads 0: as many as heads. scale: 1 / sqrt(head_size) without one.
Heads heads_of(const Tensor& qkv, int64_t heads, int64_t kv_heads, std::optional<double> scale = std::nullopt);

}  // namespace ftbert::binding
