// Products of up to eight rows, whose time is that of reading b: what their kernels are given, and the ending of a
// tile. Beside it lie how b is stored (few_rows_storage.cuh), rows of a (few_rows_norm.cuh) and launches
// (few_rows_launch.cuh). Kernels differ in how they bring b.
//
// A tile is eight of b's rows, the narrow operand of the tensor cores' products (mma.sync m16n8); all rows of a are the
// wide operand. Eight warps multiply: they share a tile's columns, and then one of them, each for another tile, adds up
// the eight warps' sums; or, where k is short, each has a tile alone (kMostApartSteps).
#pragma once
#include "core/format.h"
#include "core/norm.h"
#include "core/types.h"
#include "device/fragment.cuh"
#include "gemm/gpu/endings/store.cuh"

namespace ftbert {

template <class E>
struct FewRows {
  const E* a;  // [m, k]
  const void* b;
  const E* bias;  // [n], or nullptr
  E* c;           // [m, n], with a gate [m, n / 2]
  Norm<E> norm;   // of a's rows
  bool add;       // c is added to
  Activation activation;
  Gate gate;
  int m, n, k;
  int stages, row_bytes;  // of the ring; of a row of a where the kernel reads it
  uint32_t* count;        // of the tiles that blocks have asked for, from 0; nullptr: they are dealt evenly
  // Rows of a as b's storage wishes them, of `prepared_bytes` each, and behind all rows their scales; nullptr: each
  // block lays them out.
  const char* prepared;
  int prepared_bytes;
};

namespace {

constexpr int kFewRowsWarps = 8, kFewRowsReaders = 32 * kFewRowsWarps;
constexpr int kTileRows = kQ8TileRows;
// Where a tile has no more steps of k, a warp has it alone, and no sums are added up: by all warps three tiles of 9
// steps took 1.5 us with all of b there, most of it for waiting on each other (H100).
constexpr int kMostApartSteps = 20;

template <class Storage, class E>
__device__ bool multiplies_apart(const FewRows<E>& work) {
  return work.k / Storage::kStep <= kMostApartSteps;
}

// Two of a tile's sums, of a Fragment whose rows from 8 on are none.
template <class E>
struct SumPlace {
  int row, column;
  int64_t at;
  bool there;

  __device__ SumPlace(const FewRows<E>& work, int tile) {
    row = Fragment::row(), column = tile * kTileRows + Fragment::column();
    at = static_cast<int64_t>(row) * work.n + column;
    there = row < work.m;
  }
};

// Bias and, where c is added to, c: loaded before the sums are there.
template <class E>
__device__ float2 addend_of_sums(const FewRows<E>& work, int tile) {
  const SumPlace<E> place(work, tile);
  float bias[2] = {}, c[2] = {};
  if (place.there && work.bias) Packed<E, 2>::load(work.bias + place.column).to_floats(bias);
  if (place.there && work.add) Packed<E, 2>::load(work.c + place.at).to_floats(c);
  return {bias[0] + c[0], bias[1] + c[1]};
}

template <class E>
__device__ void store_sums(const FewRows<E>& work, int tile, float2 x) {
  const SumPlace<E> place(work, tile);
  store_pair(x, work.activation, work.gate, work.c, place.at, place.there);
}

}  // namespace
}  // namespace ftbert
