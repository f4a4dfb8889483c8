// Table of contents of the kernels. Each is a function template on <device tag, element type>, defined in
// <name>_cpu.cpp and <name>_cuda.cu. Words: batch seq heads head_size hidden inter; tokens = valid tokens;
// cu_seqlens [batch+1] = offsets of the sequences among the packed tokens; rows, cols inside row-wise kernels.
// T is float, half_t or bfloat16_t on CUDA and float on the CPU. Nothing here allocates or synchronises.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/context.h"
#include "core/operand.h"
#include "core/types.h"

namespace ftbert {

// ---- padding: padding_cpu.cpp, padding_cuda.cu -------------------------------------------------------------

// What the host must know about a mask or about ids; lives where the device can write it.
struct PaddingInfo {
  int64_t tokens;      // number of ones in the mask
  int64_t max_seqlen;  // most ones in one row
  int64_t bad_mask;    // 1 + index of a value that is neither 0 nor 1; 0: none
  int64_t bad_id;      // 1 + index of a kept token whose id is outside the vocabulary; 0: none
  int64_t bad_type;    // the same for token type ids
};

// Any 0/1 mask [batch, seq] (right or left padded, holes, empty rows) -> offsets and both index maps.
// M: uint8_t (also bool), int64_t or float. mask == nullptr means all ones.
template <class Device, class M>
void padding_offsets(Context<Device>& context, const M* mask, int64_t batch, int64_t seq,
                     int32_t* cu_seqlens,    // [batch+1] out
                     int64_t* token_index,   // [batch*seq] out: packed token -> row of the padded [batch*seq]; then 0
                     int32_t* packed_index,  // [batch*seq] out: padded row -> packed token, -1 at padding
                     PaddingInfo* info);     // out: tokens, max_seqlen, bad_mask; the bad_* of ids are cleared

// lengths [batch] (right padded) -> the uint8 mask [batch, seq] that they stand for.
template <class Device>
void padding_mask_from_lengths(Context<Device>& context, const int32_t* lengths, int64_t batch, int64_t seq,
                               uint8_t* mask);

// Looks at kept tokens only: padding may hold anything. token_index == nullptr: ids are packed already.
// The count is read from cu_seqlens[batch] on the device; at most `most` tokens.
template <class Device>
void padding_check_ids(Context<Device>& context, const int64_t* input_ids, const int64_t* token_type_ids,
                       const int64_t* token_index, const int32_t* cu_seqlens, int64_t batch, int64_t most,
                       int64_t vocab, int64_t token_types, PaddingInfo* info);

// The position id that HuggingFace gives to each kept token. Padded input when token_index is given
// (ids [batch, seq]), else packed (ids [tokens], seq ignored).
template <class Device>
void padding_positions(Context<Device>& context, PositionKind kind, const int64_t* input_ids,
                       const int64_t* token_index, const int32_t* cu_seqlens, int64_t batch, int64_t seq,
                       int64_t padding_id,
                       int64_t most,         // >= tokens
                       int32_t* positions);  // [most] out, 2^31-1 where larger; 0 past the last token

// Packed ids in buffers of a fixed size, for launches that are recorded once and repeated: ids and types of the kept
// tokens, then zeros; cu_seqlens, then its last value (empty sequences). token_type_ids == nullptr means type 0.
template <class Device>
void padding_stage(Context<Device>& context, const int64_t* input_ids, const int64_t* token_type_ids,
                   const int64_t* token_index,  // [tokens], or nullptr: ids are packed already
                   const int32_t* cu_seqlens,
                   int64_t tokens,  // at least as many as cu_seqlens[batch] says
                   int64_t batch,
                   int64_t seq,            // columns of the padded ids; unused without token_index
                   int64_t most_tokens,    // >= tokens
                   int64_t most_batch,     // >= batch
                   int64_t* staged_ids,    // [most_tokens] out
                   int64_t* staged_types,  // [most_tokens] out
                   int32_t* columns,       // [most_tokens] out: columns in the sequence or its padded row, or nullptr
                   int32_t* staged_cu_seqlens);  // [most_batch+1] out

// [batch*seq, cols] -> [tokens, cols]
template <class Device, class T>
void remove_padding(Context<Device>& context, const T* padded, const int64_t* token_index, int64_t tokens, int64_t cols,
                    T* packed);

// [tokens, cols] -> [batch*seq, cols], rows at padding exactly 0
template <class Device, class T>
void restore_padding(Context<Device>& context, const T* packed, const int32_t* packed_index, int64_t rows, int64_t cols,
                     T* padded);

// First kept row of each sequence [tokens, cols] -> [batch, cols]; zeros for an empty sequence. Token t lies in row
// t - first_token of packed.
template <class Device, class T>
void first_rows(Context<Device>& context, const T* packed, int64_t first_token, const int32_t* cu_seqlens,
                int64_t batch, int64_t cols, T* out);

// Sets the rows of empty sequences to 0 in x [batch, cols].
template <class Device, class T>
void zero_empty_rows(Context<Device>& context, const int32_t* cu_seqlens, int64_t batch, int64_t cols, T* x);

// ---- embeddings_layernorm ----------------------------------------------------------------------------------

template <class T>
struct EmbeddingTables {
  const T* word;        // [vocab, cols]
  const T* position;    // [max_positions, cols] or nullptr
  const T* token_type;  // [token_types, cols] or nullptr
  const T* gamma;       // [cols] LayerNorm weight or nullptr: no LayerNorm (pre-LayerNorm models)
  const T* beta;        // [cols]
  int64_t vocab, max_positions, token_types;
  float eps;
};

// out[t] = LayerNorm(word[id] + position[p] + token_type[tt]) for each packed token, gathered from padded ids
// through token_index (nullptr: ids are packed). token_type_ids == nullptr means type 0. An id or a position outside
// its table gives a row of NaN on CUDA, where no host may be asked; the CPU's caller has checked them.
template <class Device, class T>
void embeddings_layernorm(Context<Device>& context, const EmbeddingTables<T>& tables, const int64_t* input_ids,
                          const int64_t* token_type_ids, const int64_t* token_index, const int32_t* positions,
                          int64_t tokens, int64_t cols,
                          T* out);  // [tokens, cols]

// ---- add_bias_input_layernorm ------------------------------------------------------------------------------

// sum = x + bias + input; out = LayerNorm(sum) * gamma + beta. bias and input may be nullptr (then they are 0);
// `sum` is stored only when it is given (pre-LayerNorm models carry it on). out and sum may alias x or input.
template <class Device, class T>
void add_bias_input_layernorm(Context<Device>& context, const T* x, const T* bias, const T* input, const T* gamma,
                              const T* beta, float eps, int64_t rows, int64_t cols, T* sum,
                              T* out);  // all [rows, cols]; vectors [cols]

// ---- add_bias_act ------------------------------------------------------------------------------------------

// x = act(x + bias), in place. bias may be nullptr.
template <class Device, class T>
void add_bias_act(Context<Device>& context, T* x, const T* bias, Activation activation, int64_t rows, int64_t cols);

// ---- attention: the fused path -----------------------------------------------------------------------------

// In this and the next section cu_seqlens may point at the first of a run of sequences; token t lies in row
// t - first_token of the packed argument, so that a run can be worked on by itself.

// What is added to a score before the softmax: table[head][column(key) - column(query) + span-1]. Distances outside
// the table are read as its first and last.
template <class T>
struct RelativeBias {
  const T* table = nullptr;          // [heads, 2*span-1], or nullptr: nothing is added
  const int32_t* columns = nullptr;  // [all tokens, from token 0] columns in the padded input; nullptr: in the sequence
  int64_t span = 0;
};

// softmax(q k^T / sqrt(head_size) + bias) v within each sequence, on packed tokens; no score matrix in memory.
// Of each sequence the first `queries` rows are computed, and perhaps more; the others are left as they were.
template <class Device, class T>
void attention(Context<Device>& context, const Operand& qkv,  // [tokens, 3*hidden], bias already added
               int64_t tokens, int64_t first_token, const int32_t* cu_seqlens, RelativeBias<T> bias, int64_t batch,
               int64_t max_seqlen, int64_t queries, int64_t heads, int64_t head_size,
               void* scratch,  // attention_scratch_bytes
               T* out);        // [tokens, hidden]
// The type in which attention takes qkv from a product by a weight stored as `weight`: on the CPU bf16 where that
// product rounds and the CPU has instructions for it, and then attention's own products are of bf16 too; else T.
template <class Device, class T>
DType attention_operand(DType weight);
template <class Device, class T>
size_t attention_scratch_bytes(int64_t max_seqlen, int64_t head_size,
                               bool alone = false);  // on the CPU: for a thread with sequences of its own
template <class Device, class T>
bool attention_supports(const Context<Device>& context, int64_t head_size);
// What the CPU's kernel multiplies where weights are bf16, for `ftbert info`: "bf16, AMX tiles", "bf16" or "fp32".
const char* attention_products(int64_t head_size);
// Whether heads of this size are multiplied by tiles: they fill them.
bool attention_by_tiles(int64_t head_size);

// ---- the general attention path: add_qkv_bias, GEMM, softmax, GEMM, transpose ------------------------------

// [tokens, 3*hidden] + bias [3*hidden] (nullptr: 0) -> q, k, v [batch, heads, seq, head_size], padding restored
// as zeros.
template <class Device, class T>
void add_qkv_bias(Context<Device>& context, const T* qkv, const T* bias, int64_t first_token, const int32_t* cu_seqlens,
                  int64_t batch, int64_t seq, int64_t heads, int64_t head_size, T* q, T* k, T* v);

// scores, probabilities [batch, heads, seq, seq]: softmax(scale * score + bias) over the keys of the row's own
// sequence; 0 at keys and queries past its length. May run in place where T is float.
template <class Device, class T>
void softmax(Context<Device>& context, const float* scores, const int32_t* cu_seqlens, float scale,
             RelativeBias<T> bias, int64_t batch, int64_t heads, int64_t seq, T* probabilities);

// [batch, heads, seq, head_size] -> [tokens, hidden], dropping padding
template <class Device, class T>
void transpose(Context<Device>& context, const T* x, int64_t first_token, const int32_t* cu_seqlens, int64_t batch,
               int64_t seq, int64_t heads, int64_t head_size, T* out);

// ---- pooling -----------------------------------------------------------------------------------------------

// One vector a sequence from its packed tokens, in float; zeros for an empty sequence. normalize: to unit length.
template <class Device, class T>
void pooling(Context<Device>& context, const T* hidden, const int32_t* cu_seqlens, int64_t batch, int64_t cols,
             PoolingMode mode, bool normalize,
             float* out);  // [batch, cols]

}  // namespace ftbert
