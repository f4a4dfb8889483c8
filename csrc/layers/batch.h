// What goes through the layers, and how it is cut: runs of whole sequences, and chunks of rows.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "gemm/gemm.h"

namespace ftbert {

// Packed sequences; token t of the batch is row t of the hidden states.
struct PackedBatch {
  const int32_t* cu_seqlens = nullptr;  // [batch+1]; on the CPU readable by the host
  const int32_t* columns = nullptr;     // [tokens] columns in the padded input, or nullptr: those in the sequence
  int64_t batch = 0;
  int64_t tokens = 0;      // on a GPU an upper bound: rows past cu_seqlens[batch] are undefined
  int64_t max_seqlen = 0;  // upper bound of the longest sequence
};

// Whole sequences that go through a layer together.
struct Run {
  int64_t first_sequence, sequences, first_token, tokens;
};

// Rows that go through the products after attention together. `computed` rows run through a product, `rows` of them
// are read (gemm_rows).
struct Chunk {
  int64_t first, rows, computed;
};

template <class Device>
std::vector<Chunk> chunks_of(const Context<Device>& context, int64_t rows) {
  std::vector<Chunk> all;
  for (int64_t first = 0; first < rows;) {
    const int64_t left = rows - first, computed = gemm_rows(context, left);
    all.push_back({first, std::min(left, computed), computed});
    first += all.back().rows;
  }
  return all;
}

}  // namespace ftbert
