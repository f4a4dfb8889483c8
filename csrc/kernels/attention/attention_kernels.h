// The fused path's kernels on GPUs: what a call is, the registry, and which kernel runs a call. No CUDA header.
#pragma once
#include <algorithm>
#include <cstdint>
#include <span>
#include <string_view>

#include "core/context.h"
#include "kernels/kernels.h"

namespace ftbert {

// What the choice of a kernel depends on. Rows, sequences and the longest may be upper bounds (binding/replay.cpp).
struct AttentionSize {
  int sm_count = 0;
  bool mma = false;          // this GPU has mma.sync of the elements, where they have 16 bits: of bf16 from 8.0 on
  bool ampere = false;       // this GPU has the instructions of 8.0
  bool hopper = false;       // this GPU and this build have warpgroup instructions
  int64_t shared_bytes = 0;  // of shared memory, that a block can ask for
  int64_t heads = 0, head_size = 0;
  ScoreMembers scores = {};  // that are set in the policy
  Window window = {};
  bool whole = false;     // each token is a query and a key with as many heads; q, k and v lie side by side; no window
  bool e4m3 = false;      // the result is wished in E4M3
  bool arrivals = false;  // AttentionScratch has them
  int64_t sequences = 0, max_q = 0, max_k = 0, rows = 0;

  bool operator==(const AttentionSize&) const = default;

  // Of `queries` each, of all sequences and heads.
  int64_t blocks(int64_t queries) const { return (std::min(max_q, max_k) + queries - 1) / queries * sequences * heads; }
  // For each block of 64 queries there is a multiprocessor of its own.
  bool room() const { return blocks(64) <= sm_count; }
  // Keys that 64 neighbouring queries see, at most.
  int64_t reach() const { return std::min(max_k, int64_t{64} + window.left + window.right); }
  bool causal() const { return window.right == 0; }
};

template <class T>
struct AttentionCall {
  const Context<Cuda>& context;
  const Heads& heads;
  const QueriesKeysValues& from;
  const Sequences& sequences;
  const ScorePolicy<T>& policy;
  const AttentionScratch& scratch;
  const Operand& out;

  T* plain_out() const { return out.scaled() ? static_cast<T*>(out.data) : out.template as<T>(); }
};

template <class T>
struct AttentionKernel {
  std::string_view name;
  ScoreMembers reads;  // of the policy; a kernel gets no other member
  bool stores_e4m3;    // the result; else T
  // Whether this GPU and this build compute calls of this size, by policies that the kernel reads.
  bool (*supports)(const AttentionSize& size);
  // Whether no kernel behind it in the registry is expected to be faster.
  bool (*guess)(const AttentionSize& size);
  void (*run)(const AttentionCall<T>& call);

  bool fits(const AttentionSize& size) const {
    return reads.has_all(size.scores) && (size.e4m3 || !stores_e4m3) && supports(size) && guess(size);
  }
};

// The registry, in this order: attention_decode_cuda.cu; attention_e4m3_cuda.cu, where T has 16 bits;
// attention_positions_cuda.cu; attention_cuda.cu.
template <class T>
std::span<const AttentionKernel<T>> decode_kernels();
template <class T>
std::span<const AttentionKernel<T>> e4m3_kernels();
template <class T>
std::span<const AttentionKernel<T>> position_kernels();
template <class T>
std::span<const AttentionKernel<T>> attention_kernels();

}  // namespace ftbert
