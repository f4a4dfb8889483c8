// How attention_decode deals out a head's keys and columns to lanes, and what a launch of it gets.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

#include "device/vector.cuh"
#include "kernels/attention/new_tokens.cuh"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

constexpr int kDecodeWarps = 4, kDecodeThreads = 32 * kDecodeWarps;
// Heads of queries that a block takes, at most, side by side over the same keys; with four the code of a few keys was
// slower. Blocks of further heads find the keys in L2.
constexpr int kMostDecodeHeads = 2;
constexpr int kMostSplits = 32;              // of a sequence's keys: a lane each, where one block merges them
constexpr int kMostDecodeSequences = 65535;  // a grid's third dimension
constexpr int kMostSplitBlocks = 512;        // where keys are split

// kHeads: of queries, in a block. Neighbouring lanes have a key together, a chunk of 16 bytes each: kLanes is the
// number of a head's chunks, rounded up to a power of two. With heads of 80 and 96 some lanes have none; with heads of
// 256 in float each has two.
template <class E_, int kHeadSize_, int kHeads_>
struct DecodeShape {
  using E = E_;
  static constexpr int kHeadSize = kHeadSize_, kHeads = kHeads_;
  static constexpr int kInChunk = kWidth<E>, kChunks = kHeadSize / kInChunk;
  using Chunk = Packed<E, kInChunk>;
  static constexpr int kLanes = std::min(32, static_cast<int>(std::bit_ceil(static_cast<unsigned>(kChunks))));
  static constexpr int kOwn = (kChunks + kLanes - 1) / kLanes;  // chunks of a lane
  static constexpr int kNumbers = kOwn * kInChunk;              // of a key, that a lane has
  static constexpr int kKeysInWarp = 32 / kLanes;
  static constexpr int kAtOnce = 4 / kOwn;                                // keys of a lane in a round
  static constexpr int kStep = kDecodeWarps * kKeysInWarp * kAtOnce;      // keys of a block in a round
  static constexpr int kFours = kHeadSize / 4, kItems = kHeads * kFours;  // an item: four columns of a head

  static __device__ int warp() { return static_cast<int>(threadIdx.x / 32); }
  // The place of this lane among the lanes that share a key, and the place of that key among the warp's keys.
  static __device__ int part() { return static_cast<int>(threadIdx.x % kLanes); }
  static __device__ int key() { return static_cast<int>(threadIdx.x % 32 / kLanes); }
  // Which of the head's chunks is this lane's chunk i, and whether there is one.
  static __device__ int chunk(int i) { return i * kLanes + part(); }
  static __device__ bool has(int i) { return kLanes * kOwn == kChunks || chunk(i) < kChunks; }
};

template <class E>
struct DecodeParameters {
  const E *q, *k, *v;
  int64_t q_stride, k_stride, v_stride, out_stride;  // of rows, in elements
  const int32_t *cu_q, *begin_k, *end_k;             // as in Sequences
  int64_t first_q, first_k;
  bool early;  // the offsets, and all keys but those of this step's tokens, were there before the kernel ahead began
  Window window;
  float scale_log2;
  int shared;          // heads of queries that read one head of keys and values
  int blocks_a_head;   // blocks of a split that share a head of keys, each for kHeads heads of queries
  float* splits;       // room for what blocks leave: decode_memory.cuh
  int32_t* arrivals;   // [sequence][head block] zeros, and zeros again at the end
  NewTokens<E> added;  // whose queries are at q
  E* out;              // [queries, out_stride]

  // Whether the sequences' tokens are not in the cache yet: blocks make their heads, and put them there.
  __device__ bool adds() const { return added.keys != nullptr; }
};

}  // namespace
}  // namespace ftbert
