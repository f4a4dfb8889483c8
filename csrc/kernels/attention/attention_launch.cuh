// How the fused path's kernels are launched, and how they are registered. `out`: nothing, or E4m3Rows, which then get
// the result. scores: what the kernel reads of the policy.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>

#include "core/check.h"
#include "device/e4m3_rows.cuh"
#include "device/launch.cuh"
#include "kernels/attention/attention_bias.cuh"
#include "kernels/attention/attention_kernels.h"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

template <class T>
using Call = AttentionCall<T>;

// Query blocks of each sequence and head, and all of them as one grid dimension (y and z end at 65535).
struct Grid {
  int query_blocks;
  unsigned ctas;
  bool room;  // for each block a multiprocessor of its own
  template <class T>
  Grid(const Call<T>& call, int block)
      : query_blocks(static_cast<int>((std::min(call.sequences.max_q, call.sequences.max_k) + block - 1) / block)) {
    const int64_t all = query_blocks * call.sequences.count * call.heads.count;
    FTBERT_CHECK(all <= INT32_MAX, "attention: ", all,
                 " blocks are more than one launch can have; pass fewer sequences");
    ctas = static_cast<unsigned>(all);
    room = all <= call.context.sm_count;
  }
};

// The kernels work with powers of 2.
template <class T>
float scale_log2(const Call<T>& call) {
  return static_cast<float>(M_LOG2E * static_cast<double>(call.heads.scale));
}

template <class T, ScoreMembers kReads>
BiasTables<native_t<T>> bias_of(const ScoresRead<T, kReads>& scores) {
  if constexpr (kReads.has(ScoreMember::bias)) {
    const RelativeBias<T>& bias = scores.template get<ScoreMember::bias>();
    return {native(bias.table), bias.columns, static_cast<int>(bias.span)};
  } else {
    return {};
  }
}

inline void check_rows(const QueriesKeysValues& from) {
  const int64_t in_chunk = 16 / bytes_of(from.dtype);
  for (const Rows& rows : {from.q, from.k, from.v})
    FTBERT_CHECK(reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.stride % in_chunk == 0,
                 "attention on a GPU reads 16 bytes at a time: rows must begin at multiples of that");
  // TileLoader counts the elements of a tile's rows in 32 bits.
  for (const Rows& rows : {from.q, from.k, from.v})
    FTBERT_CHECK(rows.stride < 1 << 26, "attention on a GPU reads rows less than 2^26 elements apart, not ",
                 rows.stride);
}

// Sizes of heads with kernels of whole sequences, and with kernels that store E4M3.
constexpr bool is_common_head(int64_t size) { return size <= 128 && std::has_single_bit(static_cast<uint64_t>(size)); }

// The registry's entry of a kernel that a struct describes by kName, kReads, has (a head size), supports, guess, and
// launch<head size>(call, scores, out...).
template <class Kernel, class T, class... Out>
constexpr AttentionKernel<T> registered() {
  return {Kernel::kName,
          Kernel::kReads,
          sizeof...(Out) > 0,
          [](const AttentionSize& size) {
            return FusedHeads::has(size.head_size) && Kernel::has(size.head_size) && Kernel::supports(size);
          },
          &Kernel::guess,
          [](const Call<T>& call) {
            const auto scores = call.policy.template read<Kernel::kReads>(Kernel::kName);
            FusedHeads::with(call.heads.size, [&]<int kHeadSize>() {
              if constexpr (Kernel::has(kHeadSize)) Kernel::template launch<kHeadSize>(call, scores, Out(call.out)...);
            });
          }};
}

}  // namespace
}  // namespace ftbert
