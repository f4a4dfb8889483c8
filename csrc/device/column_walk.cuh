// Elementwise work on [rows, cols]: each thread keeps one pack of columns (its bias, its columns of a head) and walks
// down the rows, so that nothing is divided inside the loop and neighbouring threads touch neighbouring memory.
#pragma once
#include <algorithm>
#include <cstdint>

namespace ftbert {

inline constexpr int kColumnThreads = 256;

// Blocks that fill the device once, each thread with about `rows_per_thread` rows; at least one thread a pack.
inline unsigned column_blocks(int64_t rows, int64_t packs, int rows_per_thread, int sm_count) {
  const auto blocks = [](int64_t threads) { return (threads + kColumnThreads - 1) / kColumnThreads; };
  const int64_t wanted = std::min<int64_t>(blocks((rows + rows_per_thread - 1) / rows_per_thread * packs),
                                           int64_t{sm_count} * (2048 / kColumnThreads));
  return static_cast<unsigned>(std::max(wanted, blocks(packs)));
}

struct ColumnWalk {
  int64_t row, step;  // row >= step: a left-over thread without work
  int pack;

  __device__ explicit ColumnWalk(int packs) {
    // Fits 32 bits: column_blocks makes one wave, or one thread a pack (packs < 2^30).
    const unsigned thread = blockIdx.x * kColumnThreads + threadIdx.x;
    row = thread / packs;
    pack = thread % packs;
    step = gridDim.x * kColumnThreads / packs;
  }
  __device__ bool idle() const { return row >= step; }
};

// The same walk over the rows of [batch, seq], with the sequence and the position in it kept along.
struct SequenceWalk : ColumnWalk {
  int64_t sequence, position;
  int64_t sequence_step, position_step;

  __device__ SequenceWalk(int packs, int64_t seq) : ColumnWalk(packs) {
    sequence = row / seq;
    position = row % seq;
    sequence_step = step / seq;
    position_step = step % seq;
  }
  __device__ void next(int64_t seq) {
    row += step;
    sequence += sequence_step;
    position += position_step;
    if (position >= seq) {
      position -= seq;
      ++sequence;
    }
  }
};

}  // namespace ftbert
