// What goes through the layers, and how it is cut: runs of whole sequences, and chunks of rows.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "gemm/gemm.h"
#include "kernels/kernels.h"

namespace ftbert {

// Whole sequences that go through a layer together.
struct Run {
  int64_t first_sequence, sequences, first_token, tokens;
};

class KvCache;

// What goes through a model: packed tokens of whole sequences, of which token t is row t of the hidden states. Their
// ids are packed too, or lie in padded rows.
struct Batch {
  // Each token a query and a key, or with a cache a query whose keys are there; on the CPU the offsets are readable by
  // the host.
  Sequences sequences;
  const int64_t* ids = nullptr;         // [tokens], or padded [sequences.count, seq]
  const int64_t* types = nullptr;       // token type ids, like ids; nullptr: all 0
  const int64_t* to_padded = nullptr;   // [tokens] where a token lies in the padded ids; nullptr: they are packed
  int64_t seq = 0;                      // columns of the padded ids
  const int32_t* positions = nullptr;   // [tokens] position ids (layers/positions.h)
  const int32_t* columns = nullptr;     // [tokens]; nullptr: a token's place in its sequence
  OutputRows rows;                      // of the last hidden state
  const KvCache* cache = nullptr;       // which keys and values are stored in, and read from
  const int32_t* cache_rows = nullptr;  // [tokens], with a cache: where those of a token go
  // With a decoder's cache: the slots whose tokens these follow, at least one token of each sequence. max_k counts
  // tokens in a slot too; positions, cache_rows and keys' offsets are found by the forward pass.
  CacheSlots slots = {};
  int64_t shared_prefix = 0;  // with a cache: tokens of the first sequence, that all others go on behind
  // [tokens, hidden] of the stream's type: what the stage before has left, where this is a later one.
  const void* hidden = nullptr;
  // Of rotary positions that depend on a sequence's length: the table of this batch, [tokens, dims], and each token's
  // row in it.
  const float* angles = nullptr;
  const int32_t* angle_rows = nullptr;

  int64_t tokens() const { return sequences.rows; }  // on a GPU an upper bound
  // [tokens] where a token stands in its sequence. Positions that are not columns come with these.
  const int32_t* places() const { return columns ? columns : positions; }
  // [tokens] by which the table of a rotation turns.
  const int32_t* turns() const { return angles ? angle_rows : places(); }
  Rotation turned_by(Rotation of_layer) const {
    if (of_layer && angles) of_layer.table = angles, of_layer.positions = tokens();
    return of_layer;
  }
  int64_t output_rows() const { return rows.of(sequences); }
  Sequences of(const Run& run) const {
    Sequences some = sequences.from(run.first_sequence);
    some.count = run.sequences, some.rows = run.tokens, some.first_q = run.first_token;
    if (!cache) some.rows_k = run.tokens, some.first_k = run.first_token;
    return some;
  }
};

// Rows that go through the products after attention together. `computed` rows run through a product, `rows` of them
// are read (gemm_rows).
struct Chunk {
  int64_t first, rows, computed;
};

// of: the first of those products.
template <class Device, class T>
std::vector<Chunk> chunks_of(const Context<Device>& context, const Linear<T>& of, int64_t rows) {
  std::vector<Chunk> all;
  for (int64_t first = 0; first < rows;) {
    const int64_t left = rows - first, computed = product_rows(context, of, left);
    all.push_back({first, std::min(left, computed), computed});
    first += all.back().rows;
  }
  return all;
}

}  // namespace ftbert
