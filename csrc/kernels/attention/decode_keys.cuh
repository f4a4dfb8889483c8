// The keys of one block of attention_decode. grid: splits, heads of keys * blocks_a_head, sequences. The keys that a
// sequence's query sees are divided evenly among its splits, in steps of a block; the last splits may have none.
#pragma once
#include "kernels/attention/decode_shape.cuh"

namespace ftbert {
namespace {

template <class Shape>
struct SplitKeys {
  int sequence, split, splits;
  int kv_head, first_head, heads;  // of keys; of the queries that share them, the first, and how many the block takes
  int query, queries;              // of the sequence: its first row of q, before first_q, and how many there are
  int64_t row, seen_row;           // of k and v: the sequence's first key, and the first that the query sees
  int keys;                        // of the sequence
  int live;                        // splits that have keys
  int begin, end;                  // this split's, counted from seen_row
  bool newest;                     // the split has the key of the new token, which is not in the cache: the last one
  int stored_end;                  // of this split's keys that are in the cache
  int place;                       // by which the new token's heads are turned

  // The offsets are there.
  __device__ explicit SplitKeys(const DecodeParameters<typename Shape::E>& p)
      : sequence(static_cast<int>(blockIdx.z)),
        split(static_cast<int>(blockIdx.x)),
        splits(static_cast<int>(gridDim.x)),
        kv_head(static_cast<int>(blockIdx.y) / p.blocks_a_head),
        first_head(static_cast<int>(blockIdx.y) % p.blocks_a_head * Shape::kHeads),
        heads(min(Shape::kHeads, p.shared - first_head)) {
    // Past this multiprocessor's cache, which may have older ones.
    query = __ldcg(p.cu_q + sequence), queries = __ldcg(p.cu_q + sequence + 1) - query;
    const int first_key = __ldcg(p.begin_k + sequence);
    keys = __ldcg(p.end_k + sequence) - first_key;
    place = p.adds() && p.added.rotation.table != nullptr && queries > 0 ? __ldcg(p.added.positions + query - p.first_q)
                                                                         : 0;
    const int position = keys_ahead(queries, keys);  // of the query among the keys
    const int begin_seen = p.window.begin(position), seen = p.window.end(position, keys) - begin_seen;
    // The same for all blocks of the sequence and head.
    const int each = ((max(seen, 1) + splits - 1) / splits + Shape::kStep - 1) / Shape::kStep * Shape::kStep;
    live = (max(seen, 1) + each - 1) / each;
    begin = min(split * each, seen), end = min(begin + each, seen);
    row = first_key - p.first_k, seen_row = row + begin_seen;
    newest = p.adds() && split == live - 1;
    stored_end = newest ? end - 1 : end;
  }

  // The first key of this warp in the split's first round.
  __device__ int first_of_warp() const { return begin + Shape::warp() * Shape::kKeysInWarp * Shape::kAtOnce; }
};

}  // namespace
}  // namespace ftbert
