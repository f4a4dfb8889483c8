// The ring of shared memory through which attention_decode reads keys and values. Each lane asks for the 16 bytes that
// it will multiply itself, some rounds ahead: no lane reads what another has asked for, so no barrier is needed.
#pragma once
#include "device/mma.cuh"
#include "kernels/attention/decode_keys.cuh"

namespace ftbert {
namespace {

template <class Shape>
struct LaneRing {
  using E = typename Shape::E;
  using Chunk = typename Shape::Chunk;
  // Of rounds, [keys, values][kAtOnce * kOwn][threads] of 16 bytes each. With four a block fits the 99 KB of the GPUs
  // from sm_80 on with least, twice the 164 KB of an A100, and Hopper beside blocks of the kernels ahead and behind.
  // Three fit the 64 KB of sm_75, where a lane waits for what it asks for.
  FTBERT_HOST_DEVICE static constexpr int stages(bool ampere) { return ampere ? 4 : 3; }
  static constexpr int kStages = stages(kAmpere);
  static constexpr int kStageBytes = 2 * Shape::kAtOnce * Shape::kOwn * 16 * kDecodeThreads;
  static constexpr size_t bytes(bool ampere) { return stages(ampere) * kStageBytes; }
  static constexpr int kAhead = (kStages - 1) * Shape::kStep;  // keys between the round that is read and the one asked
  enum Half { kKeys, kValues };

  const char* memory;
  uint32_t address;  // of the same
  const E *k, *v;    // of this head: the first key that the query sees
  int64_t k_stride, v_stride;
  int end;  // of the keys that are asked for
  int stage = 0;

  __device__ LaneRing(const char* memory, const DecodeParameters<E>& p, const SplitKeys<Shape>& keys)
      : memory(memory),
        address(shared_address(memory)),
        k(p.k + keys.seen_row * p.k_stride + keys.kv_head * Shape::kHeadSize),
        v(p.v + keys.seen_row * p.v_stride + keys.kv_head * Shape::kHeadSize),
        k_stride(p.k_stride),
        v_stride(p.v_stride),
        end(keys.stored_end) {}

  // Asks for the rounds before the first is read.
  __device__ void fill(int first) const {
#pragma unroll 1
    for (int ahead = 0; ahead < kStages - 1; ++ahead) ask(first + ahead * Shape::kStep, ahead);
  }
  // Waits for the next round, and asks for the one whose memory is that of the round before.
  __device__ void wait(int asked) const {
    copy_async_wait<kStages - 2>();
    ask(asked, stage == 0 ? kStages - 1 : stage - 1);
  }
  // This lane's part of its key u of the round; zeros where it has none.
  __device__ void read(Half half, int u, Chunk (&chunks)[Shape::kOwn]) const {
#pragma unroll
    for (int i = 0; i < Shape::kOwn; ++i) {
      if (!Shape::has(i))
        chunks[i] = Chunk::zero();
      else
        chunks[i] = Chunk{*reinterpret_cast<const uint4*>(memory + slot(stage, half, u, i))};
    }
  }
  __device__ void next() {
    if (++stage == kStages) stage = 0;
  }

 private:
  static __device__ int slot(int stage, int half, int u, int i) {
    return 16 * static_cast<int>(threadIdx.x) + stage * kStageBytes + half * (kStageBytes / 2) +
           (u * Shape::kOwn + i) * (16 * kDecodeThreads);
  }
  // The round of this warp's keys from `first` on; zeros beyond the end. Counts as asked for where it is empty, too.
  __device__ void ask(int first, int to) const {
#pragma unroll
    for (int u = 0; first < end && u < Shape::kAtOnce; ++u) {
      const int key = first + u * Shape::kKeysInWarp + Shape::key();
      const int64_t row = min(key, end - 1);
#pragma unroll
      for (int i = 0; i < Shape::kOwn; ++i) {
        if (!Shape::has(i)) continue;
        const int column = Shape::chunk(i) * Shape::kInChunk;
        copy_async16(address + slot(to, kKeys, u, i), k + row * k_stride + column, key < end);
        copy_async16(address + slot(to, kValues, u, i), v + row * v_stride + column, key < end);
      }
    }
    copy_async_commit();
  }
};

}  // namespace
}  // namespace ftbert
