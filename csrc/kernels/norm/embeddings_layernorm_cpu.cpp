// out[t] = norm(scale * word[id] + position[p] + token_type[tt]) for each packed token; beside it byte rows of out.
#include "device/parallel_cpu.h"
#include "kernels/elementwise/byte_row.h"
#include "kernels/kernels.h"
#include "kernels/norm/norm_row.h"

namespace ftbert::FTBERT_ISA {
namespace {

// row = scale * the table's row.
void read_row(const Operand& table, int64_t index, int64_t cols, float scale, float* row) {
  if (table.dtype() == DType::int8) {
    const int8_t* stored = static_cast<const int8_t*>(table.data) + index * cols;
    const float step = table.scale[index] * scale;
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) row[c] = static_cast<float>(stored[c]) * step;
  } else {
    const float* stored = static_cast<const float*>(table.data) + index * cols;
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) row[c] = stored[c] * scale;
  }
}

}  // namespace

void embeddings_layernorm(Context<Cpu>&, const EmbeddingTables<float>& tables, const int64_t* input_ids,
                          const int64_t* token_type_ids, const int64_t* to_padded, const int32_t* positions,
                          int64_t tokens, int64_t cols, float* out, const Operand& copy, const float* factors) {
#pragma omp parallel for schedule(static) if (tokens * cols > kSerialElements)
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t source = to_padded ? to_padded[t] : t;
    float* row = out + t * cols;
    read_row(tables.word, input_ids[source], cols, factors ? tables.scale * factors[t] : tables.scale, row);
    // The order of transformers' BertEmbeddings: word + token type, then + position.
    if (tables.token_type) {
      const float* type = tables.token_type + (token_type_ids ? token_type_ids[source] : 0) * cols;
#pragma omp simd
      for (int64_t c = 0; c < cols; ++c) row[c] += type[c];
    }
    if (tables.position) {
      const float* position = tables.position + positions[t] * cols;
#pragma omp simd
      for (int64_t c = 0; c < cols; ++c) row[c] += position[c];
    }
    norm_row(row, tables.norm, cols, row);
    if (copy) store_byte_row(row, cols, copy.scale, static_cast<uint8_t*>(copy.data) + t * byte_row_bytes(cols));
  }
}

}  // namespace ftbert::FTBERT_ISA
