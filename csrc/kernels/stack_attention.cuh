// Attention inside layer_stack_kernel: 16 queries of a head are the work of `key_parts` warps, each of which takes 16
// keys, straight from the L2 cache into the registers of mma.m16n8k16. Which element of a head stands in which place of
// a product is free, if both operands agree: so every load has 16 bytes.
#pragma once
#include "kernels/stack_worker.cuh"

namespace ftbert {
namespace {

// 16 queries of one head.
struct Queries {
  int head = 0, start = 0, length = 0, first = 0;

  template <class E>
  __device__ Queries(const StackArguments<E>& p, int unit) {
    const int sequence = unit / p.query_tiles / p.heads;
    if (sequence >= p.sequences) return;
    head = unit / p.query_tiles % p.heads;
    start = p.cu_seqlens[sequence];
    length = min(p.cu_seqlens[sequence + 1] - start, 16 * p.key_parts);
    first = unit % p.query_tiles * 16;
  }
  __device__ int count() const { return min(16, length - first); }
};

// Where in qkv a lane's first elements of a part's queries, keys and values are, -1: past the end, where another
// sequence or nothing lies. Worked out before the wait for them.
struct PartPlaces {
  int query[2], key[2];  // of rows lane / 4 and 8 further on, elements 8 * (lane % 4) on
  int value[4];  // columns kHeadSize / 8 * (lane / 4) on, of keys 2 * (lane % 4), the next, and those 8 further on

  template <class E>
  __device__ PartPlaces(const StackArguments<E>& p, const Queries& now, int head_size, int part, int lane) {
    const int group = lane / 4, member = lane % 4, stride = 3 * p.hidden;
    const int base = now.start * stride + now.head * head_size;
    const auto place = [&](int row, int column) { return row < now.length ? base + row * stride + column : -1; };
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      query[r] = place(now.first + group + 8 * r, 8 * member);
      key[r] = place(16 * part + group + 8 * r, p.hidden + 8 * member);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      value[i] = place(16 * part + i / 2 * 8 + 2 * member + i % 2, 2 * p.hidden + head_size / 8 * group);
  }
};

// One part's share: sums over its keys of 2^(score - largest) * value, [16, kHeadSize], the largest scores and the sums
// of the powers. A part that has no keys writes nothing.
template <int kHeadSize, class E>
__device__ void attend_to_part(const StackArguments<E>& p, const Queries& now, const PartPlaces& places, int part,
                               int lane, float* share) {
  constexpr int kLoads = kHeadSize / 32, kTiles = kHeadSize / 8;  // of a key; of the columns of a value
  const int first = 16 * part, group = lane / 4, member = lane % 4;
  if (first >= now.length) return;

  // Zeros past the end: a weight of zero would make a NaN of an infinity.
  const auto load = [&](auto width, int at, int further) {
    using Pack = Packed<E, decltype(width)::value>;
    return at >= 0 ? load_written<decltype(width)::value>(p.qkv + at + further) : Pack::zero();
  };
  using Eight = std::integral_constant<int, 8>;
  using Tiles = std::integral_constant<int, kTiles>;
  Packed<E, 8> query[2][kLoads], key[2][kLoads];
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int h = 0; h < kLoads; ++h) {
      query[r][h] = load(Eight(), places.query[r], 32 * h);
      key[r][h] = load(Eight(), places.key[r], 32 * h);
    }
  uint32_t value[4][kTiles / 2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto bits = load(Tiles(), places.value[i], 0).bits;
    value[i][0] = bits.x, value[i][1] = bits.y;
    if constexpr (kTiles == 8) value[i][2] = bits.z, value[i][3] = bits.w;
  }

  float score[2][4] = {};
#pragma unroll
  for (int h = 0; h < kLoads; ++h) {
    const uint4 a = query[0][h].bits, b = query[1][h].bits;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      multiply_add<E>(score[n], {a.x, b.x, a.y, b.y}, key[n][h].bits.x, key[n][h].bits.y);
      multiply_add<E>(score[n], {a.z, b.z, a.w, b.w}, key[n][h].bits.z, key[n][h].bits.w);
    }
  }
  float largest[2], total[2] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    largest[r] = -INFINITY;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int c = 2 * r; c < 2 * r + 2; ++c) {
        const bool real = first + 8 * n + 2 * member + c % 2 < now.length;
        score[n][c] = real ? score[n][c] * p.scale_log2 : -INFINITY;
        largest[r] = fmaxf(largest[r], score[n][c]);
      }
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffff, largest[r], 1));
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffff, largest[r], 2));
    const float shift = largest[r] == -INFINITY ? 0 : largest[r];  // all scores -inf: weights of zero, not NaN
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int c = 2 * r; c < 2 * r + 2; ++c) {
        score[n][c] = fast_exp2(score[n][c] - shift);
        total[r] += score[n][c];
      }
    total[r] += __shfl_xor_sync(0xffffffff, total[r], 1);
    total[r] += __shfl_xor_sync(0xffffffff, total[r], 2);
  }
  const uint32_t weights[4] = {pack_pair<E>(score[0][0], score[0][1]), pack_pair<E>(score[0][2], score[0][3]),
                               pack_pair<E>(score[1][0], score[1][1]), pack_pair<E>(score[1][2], score[1][3])};
  float sum[kTiles][4] = {};
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {  // column kTiles * g + j stands in place g of tile j
    const uint32_t halves = j % 2 ? 0x7632 : 0x5410;
    multiply_add<E>(sum[j], weights, __byte_perm(value[0][j / 2], value[1][j / 2], halves),
                    __byte_perm(value[2][j / 2], value[3][j / 2], halves));
  }

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = group + 8 * r;
    float* const to = share + row * kShareStride<kHeadSize> + 2 * kTiles * member;
#pragma unroll
    for (int c = 2 * r; c < 2 * r + 2; ++c)
#pragma unroll
      for (int j = 0; j < kTiles; j += 4)
        *reinterpret_cast<float4*>(to + c % 2 * kTiles + j) =
            make_float4(sum[j][c], sum[j + 1][c], sum[j + 2][c], sum[j + 3][c]);
    if (member == 0) {
      share[16 * kShareStride<kHeadSize> + row] = largest[r];
      share[16 * kShareStride<kHeadSize> + 16 + row] = total[r];
    }
  }
}

// The parts' shares, which follow each other, to context; by all threads of the parts' warps.
template <int kHeadSize, class E>
__device__ void join_parts(const StackArguments<E>& p, const Queries& now, const float* shares, int thread) {
  constexpr int kPacks = kHeadSize / 4;  // of four columns
  const int parts = (now.length + 15) / 16;
  for (int i = thread; i < now.count() * kPacks; i += 32 * p.key_parts) {
    const int row = i / kPacks, column = i % kPacks * 4;
    const float* const largest = shares + 16 * kShareStride<kHeadSize> + row;
    const float* const sums = shares + row * kShareStride<kHeadSize> + column;
    float weight[kMostKeyParts], most = -INFINITY, total = 0, v[4] = {};
#pragma unroll
    for (int part = 0; part < kMostKeyParts; ++part) {
      weight[part] = part < parts ? largest[part * kShareFloats<kHeadSize>] : -INFINITY;
      most = fmaxf(most, weight[part]);
    }
#pragma unroll
    for (int part = 0; part < kMostKeyParts; ++part) {
      if (part >= parts) break;
      const float w = fast_exp2(weight[part] - most);
      const float4 sum = *reinterpret_cast<const float4*>(sums + part * kShareFloats<kHeadSize>);
      total += w * largest[part * kShareFloats<kHeadSize> + 16];
      v[0] += w * sum.x, v[1] += w * sum.y, v[2] += w * sum.z, v[3] += w * sum.w;
    }
    const float inverse = 1.0f / total;
#pragma unroll
    for (int w = 0; w < 4; ++w) v[w] *= inverse;
    const int token = now.start + now.first + row;
    Packed<E, 4>::from_floats(v).store(p.context + token * p.hidden + now.head * kHeadSize + column);
  }
}

template <int kHeadSize, class E>
__device__ void run_attention(Block<E>& block) {
  const StackArguments<E>& p = block.p;
  const int blocks = gridDim.x, at_once = kStackWarps / p.key_parts * blocks;
  const int part = Thread().warp & (p.key_parts - 1);
  const auto queries_of = [&](int first) {
    return Queries(p, first + Thread().warp / p.key_parts * blocks + static_cast<int>(blockIdx.x));
  };
  const auto share_of = [&](int warp) {
    return reinterpret_cast<float*>(block.work()) + warp * kShareFloats<kHeadSize>;
  };
  const auto places_of = [&](const Queries& queries) { return PartPlaces(p, queries, kHeadSize, part, Thread().lane); };
  Queries now = queries_of(0);
  PartPlaces places = places_of(now);
  block.start_phase();
  for (int first = 0;;) {
    if (now.count() > 0) {
      const Thread me;
      attend_to_part<kHeadSize>(p, now, places, part, me.lane, share_of(me.warp));
    }
    block.meet();
    if (now.count() > 0) {
      const Thread me;
      join_parts<kHeadSize>(p, now, share_of(me.warp - part), part * 32 + me.lane);
    }
    first += at_once;
    if (first >= p.sequences * p.heads * p.query_tiles) break;
    now = queries_of(first);
    places = places_of(now);
    block.meet();  // the shares have been read
  }
  block.end_phase();
}

}  // namespace
}  // namespace ftbert
