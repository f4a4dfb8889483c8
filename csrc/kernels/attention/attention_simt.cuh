// Fused attention in FP32 without tensor cores (their TF32 would round the operands to 10 bits).
//
// One to eight neighbouring threads own one query: each holds 32 of its elements at most and as many of its output, in
// 16-byte chunks dealt out in turn, so that their reads of a key lie side by side. Keys and values go through shared
// memory.
#pragma once
#include <bit>
#include <cstdint>

#include "kernels/attention/attention_bias.cuh"
#include "kernels/attention/attention_policy.cuh"

namespace ftbert {
namespace {

constexpr int kSimtThreads = 128;
// A power of two, since they add by shuffles.
template <int kHeadSize>
constexpr int kThreadsPerSimtQuery = static_cast<int>(std::bit_ceil((kHeadSize + 31) / 32u));
constexpr int kSimtGroup = 8;  // keys between two looks at the running maximum

// qkv [tokens, 3*width], out [tokens, width]; grid: query blocks x heads x batch, query blocks fastest. Parameters:
// none, for whole sequences; or WindowParameters, and qkv is q.
template <int kHeadSize, class... Parameters>
__global__ void __launch_bounds__(kSimtThreads)
    attention_simt(const float* __restrict__ qkv, int64_t first_token, const int32_t* __restrict__ cu_seqlens,
                   int heads, int query_blocks, float scale_log2, BiasTables<float> bias, float* __restrict__ out,
                   Parameters... parameters) {
  using Seen = SeenKeys<float, Parameters...>;
  constexpr int kThreadsPerQuery = kThreadsPerSimtQuery<kHeadSize>, kQueries = kSimtThreads / kThreadsPerQuery;
  constexpr int kChunks = kHeadSize / 4, kOwn = kChunks / kThreadsPerQuery;
  constexpr int kSimtKeys = kHeadSize > 128 ? 16 : 32;  // in shared memory at a time: 32 KB at most, with their values
  wait_for_inputs();
  const int query_block = blockIdx.x % query_blocks;
  const int head = blockIdx.x / query_blocks % heads;
  const int sequence = blockIdx.x / query_blocks / heads;
  const int start = cu_seqlens[sequence], length = cu_seqlens[sequence + 1] - start;
  if (query_block * kQueries >= length) return;
  const AttentionBlock block(sequence, head, start, length, query_block * kQueries);

  __shared__ float4 keys[kSimtKeys][kChunks], values[kSimtKeys][kChunks];
  const int64_t width = static_cast<int64_t>(heads) * kHeadSize, stride = 3 * width;
  // Rows of whole sequences are found from here: through `seen` nvcc makes other code of the same sums.
  const float* const whole = qkv + (start - first_token) * stride + head * kHeadSize;
  const Seen seen(block, kQueries, kHeadSize, qkv, first_token, width, parameters...);
  const int query = query_block * kQueries + threadIdx.x / kThreadsPerQuery, part = threadIdx.x % kThreadsPerQuery;
  const bool real = query < length;

  float4 q[kOwn], sum[kOwn] = {};
#pragma unroll
  for (int i = 0; i < kOwn; ++i)
    q[i] = real ? reinterpret_cast<const float4*>(Seen::kWhole
                                                      ? whole + query * stride
                                                      : seen.q + query * seen.q_stride)[i * kThreadsPerQuery + part]
                : float4{};
  float running_max = Seen::kWhole ? -INFINITY : kNoKey, total = 0;
  const HeadBias<float> head_bias(bias, head, seen.first_key, seen.tokens());
  const int query_column = bias.table != nullptr ? head_bias.column(seen.place(query)) : 0;
  const KeyRange of_query = seen.of(query, query);

  for (int first = 0; first < seen.keys; first += kSimtKeys) {
    const int valid = min(kSimtKeys, seen.keys - first);
    __syncthreads();
    for (int i = threadIdx.x; i < kSimtKeys * kChunks; i += kSimtThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const float* k = Seen::kWhole ? whole + width + (first + row) * stride : seen.k + (first + row) * seen.k_stride;
      keys[row][chunk] = row < valid ? reinterpret_cast<const float4*>(k)[chunk] : float4{};
      values[row][chunk] = row < valid ? reinterpret_cast<const float4*>(
                                             Seen::kWhole ? k + width : seen.v + (first + row) * seen.v_stride)[chunk]
                                       : float4{};
    }
    __syncthreads();
    for (int group = 0; group < valid; group += kSimtGroup) {
      float score[kSimtGroup], group_max = running_max;
#pragma unroll
      for (int j = 0; j < kSimtGroup; ++j) {
        float dot = 0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const float4 k = keys[group + j][i * kThreadsPerQuery + part];
          dot += q[i].x * k.x + q[i].y * k.y + q[i].z * k.z + q[i].w * k.w;
        }
#pragma unroll
        for (int mask = kThreadsPerQuery / 2; mask > 0; mask /= 2) dot += __shfl_xor_sync(0xffffffff, dot, mask);
        const bool seen_key = Seen::kWhole ? group + j < valid : of_query.has(first + group + j);
        score[j] = seen_key ? dot * scale_log2 : -INFINITY;
        if (bias.table != nullptr) score[j] += kLog2E * head_bias(first + group + j, query_column);
        group_max = fmaxf(group_max, score[j]);
      }
      const float correction = exp2f(running_max - group_max);
      running_max = group_max;
      total *= correction;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        sum[i].x *= correction;
        sum[i].y *= correction;
        sum[i].z *= correction;
        sum[i].w *= correction;
      }
#pragma unroll
      for (int j = 0; j < kSimtGroup; ++j) {
        const float p = exp2f(score[j] - running_max);
        total += p;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const float4 v = values[group + j][i * kThreadsPerQuery + part];
          sum[i].x += p * v.x;
          sum[i].y += p * v.y;
          sum[i].z += p * v.z;
          sum[i].w += p * v.w;
        }
      }
    }
  }
  if (!real) return;
  const float inverse = Seen::kWhole || total != 0 ? 1.0f / total : 0.0f;
  float4* o = reinterpret_cast<float4*>(out + (start - first_token + query) * width + head * kHeadSize);
#pragma unroll
  for (int i = 0; i < kOwn; ++i)
    o[i * kThreadsPerQuery + part] =
        float4{sum[i].x * inverse, sum[i].y * inverse, sum[i].z * inverse, sum[i].w * inverse};
}

}  // namespace
}  // namespace ftbert
