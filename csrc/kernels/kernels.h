// Table of contents of the kernels. Each is a function template on <device tag, element type>, defined in
// <name>_cpu.cpp and <name>_cuda.cu. Words: batch seq heads head_size hidden inter; tokens = valid tokens;
// cu_seqlens [batch+1] = offsets of the sequences among the packed tokens; rows, cols inside row-wise kernels.
// T is float, half_t or bfloat16_t on CUDA and float on the CPU. Nothing here allocates or synchronises.
// rotary_table, rotary_angles and rotary: attention/rotary.h. Norms of training, which have no CPU side:
// norm/training_norms.h, norm/batch_norm.h.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/communicator.h"
#include "core/context.h"
#include "core/norm.h"
#include "core/operand.h"
#include "core/types.h"
#include "kernels/attention/attention_input.h"
#include "kernels/attention/rotary.h"
#include "kernels/attention/score_policy.h"

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
                     int32_t* cu_seqlens,  // [batch+1] out
                     int64_t* to_padded,   // [batch*seq] out: packed token -> row of the padded [batch*seq]; then 0
                     int32_t* to_packed,   // [batch*seq] out: padded row -> packed token, -1 at padding
                     PaddingInfo* info);   // out: tokens, max_seqlen, bad_mask; the bad_* of ids are cleared

// Looks at kept tokens only: padding may hold anything. to_padded == nullptr: ids are packed already.
// The count is read from cu_seqlens[batch] on the device; at most `most` tokens.
template <class Device>
void padding_check_ids(Context<Device>& context, const int64_t* input_ids, const int64_t* token_type_ids,
                       const int64_t* to_padded, const int32_t* cu_seqlens, int64_t batch, int64_t most, int64_t vocab,
                       int64_t token_types, PaddingInfo* info);

// The position id that HuggingFace gives to each kept token. Padded input when to_padded is given
// (ids [batch, seq]), else packed (ids [tokens], seq ignored).
template <class Device>
void padding_positions(Context<Device>& context, PositionKind kind, const int64_t* input_ids, const int64_t* to_padded,
                       const int32_t* cu_seqlens, int64_t batch, int64_t seq, int64_t padding_id,
                       int64_t most,         // >= tokens
                       int32_t* positions);  // [most] out, 2^31-1 where larger; 0 past the last token

// By what the rows of the word table are multiplied in a model that was trained with tokens dropped out (TokenDropout
// of model/config.h): 0 where a kept token's id is mask_id, else kept / (1 - m), where m is the share of such ids among
// the kept tokens of its sequence. Ids as of padding_positions.
template <class Device>
void token_factors(Context<Device>& context, const int64_t* input_ids, const int64_t* to_padded,
                   const int32_t* cu_seqlens, int64_t batch, int64_t mask_id, float kept,
                   int64_t most,     // >= tokens
                   float* factors);  // [most] out; 0 past the last token

// Packed ids in buffers of a fixed size, for launches that are recorded once and repeated: ids and types of the kept
// tokens, then zeros; cu_seqlens, then its last value (empty sequences). token_type_ids == nullptr means type 0.
template <class Device>
void padding_stage(Context<Device>& context, const int64_t* input_ids, const int64_t* token_type_ids,
                   const int64_t* to_padded,  // [tokens], or nullptr: ids are packed already
                   const int32_t* cu_seqlens,
                   int64_t tokens,  // at least as many as cu_seqlens[batch] says
                   int64_t batch,
                   int64_t seq,            // columns of the padded ids; unused without to_padded
                   int64_t most_tokens,    // >= tokens
                   int64_t most_batch,     // >= batch
                   int64_t* staged_ids,    // [most_tokens] out
                   int64_t* staged_types,  // [most_tokens] out
                   int32_t* columns,       // [most_tokens] out: columns in the sequence or its padded row, or nullptr
                   int32_t* staged_cu_seqlens);  // [most_batch+1] out

// [tokens, cols] -> [batch*seq, cols], rows at padding exactly 0
template <class Device, class T>
void restore_padding(Context<Device>& context, const T* packed, const int32_t* to_packed, int64_t rows, int64_t cols,
                     T* padded);

// ---- embeddings_layernorm ----------------------------------------------------------------------------------

template <class T>
struct EmbeddingTables {
  Operand word;         // [vocab, cols] of T; on the CPU also of int8 with a scale for each row
  const T* position;    // [max_positions, cols] or nullptr
  const T* token_type;  // [token_types, cols] or nullptr
  int64_t vocab, max_positions, token_types;
  Norm<T> norm;
  float scale = 1;  // of the word table's rows; rounded to T, as its product with a row is
};

// out[t] = norm(scale * word[id] + position[p] + token_type[tt]) for each packed token, gathered from padded ids
// through to_padded (nullptr: ids are packed). token_type_ids == nullptr means type 0. An id or a position outside
// its table gives a row of NaN on CUDA, where no host may be asked; the CPU's caller has checked them. copy: of out, as
// the product that reads it wishes, with scales; without data: none. factors [tokens], where given: of each token's
// word row, beside the scale.
template <class Device, class T>
void embeddings_layernorm(Context<Device>& context, const EmbeddingTables<T>& tables, const int64_t* input_ids,
                          const int64_t* token_type_ids, const int64_t* to_padded, const int32_t* positions,
                          int64_t tokens, int64_t cols,
                          T* out,  // [tokens, cols]
                          const Operand& copy = {}, const float* factors = nullptr);

// ---- add_bias_input_layernorm ------------------------------------------------------------------------------

// out.sum = x + bias + input; out.normed and out.copy = norm(sum), one of them at least. bias and input may be nullptr
// (then they are 0), and so may what is not to be stored. sum and normed may alias x or input. copy: of T where normed
// is not stored, and then it may alias them too; or, of 16-bit elements on CUDA, e4m3 with one scale; or byte rows on
// the CPU.
template <class Device, class T>
void add_bias_input_layernorm(Context<Device>& context, const T* x, const T* bias, const T* input, const Norm<T>& norm,
                              int64_t rows, int64_t cols,
                              const Output<T>& out);  // all [rows, cols]; vectors [cols]

// Whether norms add up the parts of a sum over ranks.
template <class Device>
inline constexpr bool kNormsAddParts = std::is_same_v<Device, Cuda>;

// x [rows, cols] as its parts of T, one of each rank.
template <class T>
struct PartialSums : PeerParts {};

// Whether the kernel below has such rows.
template <class T>
constexpr bool adds_parts(int64_t cols) {
  constexpr int64_t kWidth = 16 / sizeof(T);
  return cols % kWidth == 0 && cols <= 1024 * kWidth;
}

// The same of the sum over ranks: an all-reduce, bias, residual and norm in one kernel. Every rank adds up by itself,
// all in the same order. It waits for the kernels ahead of it on every rank. Nothing that is stored lies in a part.
template <class T>
void add_bias_input_layernorm(Context<Cuda>& context, const PartialSums<T>& x, const T* bias, const T* input,
                              const Norm<T>& norm, int64_t rows, int64_t cols, const Output<T>& out);

// x [count] = the sum over ranks, which lies in no part.
template <class T>
void all_reduce(Context<Cuda>& context, const PeerParts& parts, int64_t count, T* x);

// ---- add_bias_act ------------------------------------------------------------------------------------------

// x = act(x + bias), in place. bias may be nullptr. out, where given, gets the result instead: of 16-bit elements on
// CUDA, e4m3 with one scale, apart from x, which then stays as it is.
template <class Device, class T>
void add_bias_act(Context<Device>& context, T* x, const T* bias, Activation activation, int64_t rows, int64_t cols,
                  const Operand& out = {});

// ---- add_bias_gate -----------------------------------------------------------------------------------------

// out[i] = activation(x[2i] + bias[2i]) * (x[2i + 1] + bias[2i + 1]). bias may be nullptr. x and out, which lie apart,
// are of T; on the CPU they may be bf16, each for itself; of 16-bit elements on CUDA out may be e4m3 with one scale.
template <class Device, class T>
void add_bias_gate(Context<Device>& context, const Operand& x, const T* bias, Activation activation, int64_t rows,
                   int64_t cols, const Operand& out);  // x [rows, 2 * cols], bias [2 * cols], out [rows, cols]

// ---- quantise ----------------------------------------------------------------------------------------------

// out = x / scale in e4m3, to nearest, ties to even: 448 of what is more, NaN of NaN. On the CPU also byte rows
// (core/format.h), whose columns are first multiplied by out.scale. For edges whose producer stores nothing but T.
template <class Device, class T>
void quantise(Context<Device>& context, const T* x, int64_t rows, int64_t cols,
              const Operand& out);  // [rows, cols]; apart from x

// ---- position_table ----------------------------------------------------------------------------------------

// A table of positions behind a projection, as PositionProducts has it, from x [rows, x_stride], of whose rows the
// first heads * head_size numbers count, + bias [heads * head_size] (nullptr: 0). Row r of the table is the r-th from
// x's end. On the CPU zeros follow them, on a GPU each distance of `of` has the row that it reads.
template <class Device, class T>
void position_table(Context<Device>& context, const Heads& heads, const T* x, int64_t x_stride, const T* bias,
                    int64_t rows, const PositionProducts<T>& of, T* out);
// PositionProducts::rows, of a table of 2 * span rows: out [2 * reach + 1] for distances -reach to reach. The row of
// distance d is span - 1 + bucket(d), within the table, where bucket(-d) = -bucket(d), and buckets [reach + 1], memory
// of the host, are those of 0 to reach.
template <class Device>
void position_rows(Context<Device>& context, const int32_t* buckets, int64_t reach, int64_t span, int32_t* out);

// ---- rows that are read: padding_cpu.cpp, padding_rows_cuda.cu ---------------------------------------------

// Whose rows a caller reads: every token's, the first's or the last's of each sequence, or those that it names.
enum class RowKind { all, first, last, any };
struct OutputRows {
  RowKind kind = RowKind::all;
  const int64_t* index = nullptr;  // any: [count] packed tokens, in any order, each as often as it is wanted
  int64_t count = 0;               // any

  int64_t of(const Sequences& s) const {
    return kind == RowKind::all ? s.rows : kind == RowKind::any ? count : s.count;
  }
};

// out [rows.of(sequences), cols]: the rows that are read (not `all`) of packed, which holds the queries of these
// sequences; zeros for an empty sequence. The CPU leaves rows of `any` as they are where packed does not hold them; on
// CUDA, where no host may be asked, they become NaN.
template <class Device, class T>
void gather_rows(Context<Device>& context, const T* packed, const Sequences& sequences, const OutputRows& rows,
                 int64_t cols, T* out);

// Of each sequence the last row over the first: `cols` columns of x, whose rows lie as those of q.
template <class Device, class T>
void last_rows_to_first(Context<Device>& context, const Sequences& sequences, DType dtype, int64_t cols, int64_t stride,
                        void* x);

// out [rows, kernel * cols]: beside each other the rows of x [rows, cols] in the columns from kernel / 2 before the
// token's to kernel / 2 behind it, in its sequence; zeros where no token stands. columns: as of RelativeBias.
template <class Device, class T>
void neighbour_rows(Context<Device>& context, const T* x, const Sequences& sequences, const int32_t* columns,
                    int64_t kernel, int64_t cols, T* out);

// Sets the rows of empty sequences to 0 in x [batch, cols].
template <class Device, class T>
void zero_empty_rows(Context<Device>& context, const int32_t* cu_seqlens, int64_t batch, int64_t cols, T* x);

// ---- attention: the fused path -----------------------------------------------------------------------------

// What attention works in. With arrivals one query a sequence (max_q) runs by a kernel of its own on a GPU: its blocks
// share a sequence's keys, and may count there who is done.
struct AttentionScratch {
  void* memory = nullptr;       // attention_scratch_bytes
  int32_t* arrivals = nullptr;  // [attention_arrivals] zeros, and afterwards zeros again
};
// Sequences by all of the CPU's threads, by one with sequences of its own, or one query of each with arrivals.
enum class AttentionUse { together, alone, decode };

// softmax(scale * q k^T + bias) v within each sequence, on packed tokens; no score matrix in memory. A query that sees
// no key gives 0. `out` is of T, or on CUDA e4m3 with one scale, as the next product wishes; there is room for
// [tokens, width] numbers of T. What comes back says which it has become: T where no kernel for this call stores the
// other.
template <class Device, class T>
Operand attention(Context<Device>& context, const Heads& heads, const QueriesKeysValues& from,
                  const Sequences& sequences, const ScorePolicy<T>& policy, const AttentionScratch& scratch,
                  const Operand& out);
// The same of one query a sequence whose tokens are not in the cache yet: `rotary` into the cache, then attention, in
// one kernel. qkv [tokens, qkv_width] is left as it is. With Sequences::early the kernel ahead stores no keys of the
// cache either: those that are there are read before it has ended. False, and nothing runs, where there is no such
// kernel.
template <class Device, class T>
bool attention_of_new_tokens(Context<Device>&, const Heads&, const HeadRules<T>&, const T*, const Sequences&,
                             const CacheRows<T>&, const ScorePolicy<T>&, const AttentionScratch&, T*) {
  return false;
}
template <class T>
bool attention_of_new_tokens(Context<Cuda>& context, const Heads& heads, const HeadRules<T>& rules, const T* qkv,
                             const Sequences& sequences, const CacheRows<T>& cache, const ScorePolicy<T>& policy,
                             const AttentionScratch& scratch, T* out);
// The type in which attention takes q, k and v from a product by a weight stored as `weight`: on the CPU bf16 where
// that product rounds, to bf16 or 8 bits, and the CPU has instructions for it, and then attention's own products are of
// bf16 too; else T.
template <class Device, class T>
DType attention_operand(const Format& weight);
// position_stride: PositionProducts::stride, 0 where there are none.
template <class Device, class T>
size_t attention_scratch_bytes(const Heads& heads, int64_t max_k, AttentionUse use, int64_t position_stride);
template <class Device>
int64_t attention_arrivals();  // 0: none are needed
// What the fused path lacks for these heads and members of a policy ("has no kernel ..."); "": nothing.
template <class Device, class T>
std::string why_no_fused_attention(const Context<Device>& context, const Heads& heads, ScoreMembers set);
// What the fused kernels of CPUs read of a policy.
inline constexpr ScoreMembers kCpuAttentionReads{ScoreMember::window, ScoreMember::bias, ScoreMember::positions};
// The fused kernel of a GPU for so many sequences of `length` tokens each, or for one token of each behind as many in a
// cache (attention_kernels.h).
template <class T>
std::string_view attention_kernel_name(const Context<Cuda>& context, const Heads& heads, const ScorePolicy<T>& policy,
                                       int64_t sequences, int64_t length, AttentionUse use = AttentionUse::together);
// What the CPU's kernel multiplies where weights are bf16, for `ftbert info`: "bf16, AMX tiles", "bf16" or "fp32".
const char* attention_products(int64_t head_size);
// Whether heads of this size are multiplied by tiles: they fill them.
bool attention_by_tiles(int64_t head_size);

// ---- keys and values of earlier tokens: kv_cache_cpu.cpp, kv_cache_cuda.cu ---------------------------------

// Of a cache with `positions` rows a slot: those that a call's sequences are in, no slot twice.
struct CacheSlots {
  const int32_t* index;  // [count]
  int32_t* lengths;      // [all slots] tokens that are there already
  int64_t positions;
};
// Where they come to lie: tokens in rows of the cache, and their positions; which rows are then a sequence's keys.
struct CachePlaces {
  int32_t *rows, *positions;  // [tokens]; -1 and 0 past the last token
  int32_t *begin_k, *end_k;   // [count]
};
template <class Device>
void cache_places(Context<Device>& context, const CacheSlots& slots, const int32_t* cu_seqlens, int64_t count,
                  int64_t most,  // >= tokens
                  const CachePlaces& to);
// The slots' lengths with the call's tokens, after the last layer.
template <class Device>
void cache_grow(Context<Device>& context, const CacheSlots& slots, int64_t count, const CachePlaces& places);

// A GPU reads and writes keys and values 16 bytes at a time: rows begin at multiples of that.
inline constexpr int64_t kCudaRowBytes = 16;

// The columns of keys and values in qkv [tokens, qkv_width] -> the cache.
template <class Device, class T>
void store_keys_values(Context<Device>& context, const Heads& heads, const T* qkv, int64_t tokens,
                       const CacheRows<T>& cache);

// ---- sequences behind a common prefix: kv_cache_cpu.cpp, kv_cache_cuda.cu ----------------------------------

// The first sequence is the prefix of all others, whose own tokens follow it. Of a call's keys, token t of sequence i
// has row i * prefix + t; before the own ones of each sequence but the first there is room for the prefix's.
template <class Device>
void shared_prefix_places(Context<Device>& context, const int32_t* cu_seqlens, int64_t count,
                          int64_t prefix,  // tokens
                          int64_t most,    // >= tokens
                          const CachePlaces& to);

// The first `prefix` rows of keys, and of values, [rows, width] over those from each of `begins` [count] on; not where
// that is among the first, or would go past the last.
template <class Device, class T>
void repeat_prefix(Context<Device>& context, int64_t width, int64_t prefix, const int32_t* begins, int64_t count,
                   int64_t rows, T* keys, T* values);

// ---- the general attention path: add_qkv_bias, GEMM, softmax, GEMM, transpose ------------------------------

// seq is sequences.max_k, and every token a query and a key.

// [tokens, qkv_width] + bias [qkv_width] (nullptr: 0) -> q, k, v [count, heads, seq, head_size], padding restored as
// zeros; heads of keys and values are repeated for the query heads that they serve.
template <class Device, class T>
void add_qkv_bias(Context<Device>& context, const Heads& heads, const T* qkv, const T* bias, const Sequences& sequences,
                  T* q, T* k, T* v);

// scores [count, heads, seq, seq], not scaled yet, += the products with positions; q, k [count, heads, seq, head_size].
// What stands past a sequence's length stays as it is.
template <class Device, class T>
void add_position_products(Context<Device>& context, const Heads& heads, const T* q, const T* k,
                           const Sequences& sequences, const PositionProducts<T>& positions, float* scores);

inline constexpr ScoreMembers kSoftmaxReads{ScoreMember::window, ScoreMember::bias, ScoreMember::soft_cap};
// scores, probabilities [count, heads, seq, seq]: softmax(scale * score, capped, + bias) over the keys that the row's
// query sees; 0 at all others and at queries past its length. May run in place where T is float.
template <class Device, class T>
void softmax(Context<Device>& context, const Heads& heads, const float* scores, const Sequences& sequences,
             const ScorePolicy<T>& policy, T* probabilities);

// [count, heads, seq, head_size] -> [tokens, width], dropping padding
template <class Device, class T>
void transpose(Context<Device>& context, const Heads& heads, const T* x, const Sequences& sequences, T* out);

// ---- pooling -----------------------------------------------------------------------------------------------

// One vector a sequence from its packed tokens, in float; zeros for an empty sequence. cu_seqlens == nullptr: a row is
// a sequence. normalize: to unit length.
template <class Device, class T>
void pooling(Context<Device>& context, const T* hidden, const int32_t* cu_seqlens, int64_t batch, int64_t cols,
             PoolingMode mode, bool normalize,
             float* out);  // [batch, cols]

// ---- argmax ------------------------------------------------------------------------------------------------

// ids[row]: the column of the row's largest number, the first of equal ones; -1 where the row holds NaN, or its largest
// number is infinite (all may be -inf). cols is at least 1.
template <class Device, class T>
void argmax(Context<Device>& context, const T* logits, int64_t rows, int64_t cols,
            int64_t* ids);  // logits [rows, cols], ids [rows]

// ---- max_sim: max_sim/ -------------------------------------------------------------------------------------

// Late interaction: a query and a document are vectors each, packed, one after the other.
struct MaxSim {
  DType dtype;                            // of both: fp32, fp16, bf16 or int8
  const void* queries = nullptr;          // [cu_queries[query_count], width]
  const void* documents = nullptr;        // [cu_documents[document_count], width]
  const int32_t* cu_queries = nullptr;    // [query_count+1]; on the CPU the offsets are readable by the host
  const int32_t* cu_documents = nullptr;  // [document_count+1]
  const int32_t* query_of = nullptr;      // [document_count], or nullptr: each document with every query
  int64_t query_count = 0, document_count = 0, width = 0;

  // [query_count, document_count], or with query_of [document_count].
  int64_t scores() const { return document_count * (query_of ? 1 : query_count); }
};

// The score of a document that has no vectors: below that of any other, and a number that JSON has.
inline constexpr float kScoreOfNothing = -1e9f;

// scores: over the query's vectors the sum of the largest product with a vector of the document, in float, of int8 in
// int32; NaN where one of these is. 0 for a query without vectors. No products are left in memory. scratch: as many
// bytes as max_sim_scratch_bytes says.
template <class Device>
void max_sim(Context<Device>& context, const MaxSim& of, void* scratch, float* scores);
template <class Device>
size_t max_sim_scratch_bytes(const MaxSim& of);

}  // namespace ftbert
