// From a mask to offsets and index maps; the checks and positions of ids. Everything stays on the device.
#include <algorithm>

#include "device/launch.cuh"
#include "device/vector.cuh"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

constexpr int kThreads = 128;        // of a block that works on one sequence at a time
constexpr int kScanThreads = 1024;   // of the one block that scans the sequences' counts
constexpr int64_t kOneBlock = 8192;  // elements of a mask that one block works on alone
constexpr unsigned kAllLanes = 0xffffffffu;

// Blocks of kThreads, one an item, looping where there are more items than fill the device.
unsigned grid(int64_t items, int sm_count) {
  return static_cast<unsigned>(std::clamp<int64_t>(items, 1, int64_t{sm_count} * (2048 / kThreads)));
}

// Keeps the smallest 1 + index that is reported, so that a message does not change from run to run.
__device__ void report_first(int64_t* slot, int64_t index) {
  auto* word = reinterpret_cast<unsigned long long*>(slot);
  const auto mine = static_cast<unsigned long long>(index) + 1;
  unsigned long long seen = atomicCAS(word, 0ull, mine);
  while (seen > mine) {
    const unsigned long long was = atomicCAS(word, seen, mine);
    if (was == seen) return;
    seen = was;
  }
}

// Where each flagged thread of the block stands among the flagged ones; `total` is how many there are.
// `warp_count` is shared memory of the block; the next call must come after a barrier.
__device__ int rank_in_block(bool flag, int32_t* warp_count, int& total) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned ballot = __ballot_sync(kAllLanes, flag);
  if (lane == 0) warp_count[warp] = __popc(ballot);
  __syncthreads();
  int rank = __popc(ballot & ((1u << lane) - 1));
  total = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) rank += warp_count[w];
    total += warp_count[w];
  }
  return rank;
}

// cu_seqlens[b + 1] = number of kept columns of sequence b.
template <class M>
__global__ void __launch_bounds__(kThreads)
    count_kept_kernel(const M* mask, int64_t batch, int64_t seq, int32_t* cu_seqlens) {
  for (int64_t row = blockIdx.x; row < batch; row += gridDim.x) {
    int32_t count = 0;
    if (mask != nullptr) {
      for (int64_t col = threadIdx.x; col < seq; col += kThreads) count += mask[row * seq + col] != M(0);
      count = reduce<kThreads>(count, Sum());
    } else {
      count = static_cast<int32_t>(seq);
    }
    if (threadIdx.x == 0) cu_seqlens[row + 1] = count;
  }
}

// Counts -> offsets, in place, by one block: 1024 sequences a round (4096 take four).
__device__ void scan_counts(int64_t batch, int32_t* cu_seqlens, PaddingInfo* info) {
  __shared__ int64_t warp_total[kScanThreads / 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int64_t carry = 0;  // 64-bit: a batch too large for int32 offsets is then seen in info->tokens
  int32_t longest = 0;
  for (int64_t first = 0; first < batch; first += kScanThreads) {
    const int64_t sequence = first + threadIdx.x;
    const int32_t count = sequence < batch ? cu_seqlens[sequence + 1] : 0;
    longest = max(longest, count);
    int64_t inclusive = count;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int64_t left = __shfl_up_sync(kAllLanes, inclusive, offset);
      if (lane >= offset) inclusive += left;
    }
    if (lane == 31) warp_total[warp] = inclusive;
    __syncthreads();
    const int64_t before = reduce<32>(lane < warp ? warp_total[lane] : int64_t{0}, Sum());
    const int64_t total = reduce<32>(warp_total[lane], Sum());
    if (sequence < batch) cu_seqlens[sequence + 1] = static_cast<int32_t>(carry + before + inclusive);
    carry += total;
    __syncthreads();  // warp_total is written again
  }
  longest = reduce<kScanThreads>(longest, Max());
  if (threadIdx.x == 0) {
    cu_seqlens[0] = 0;
    *info = PaddingInfo{carry, longest, 0, 0, 0};
  }
}

__global__ void __launch_bounds__(kScanThreads)
    scan_counts_kernel(int64_t batch, int32_t* cu_seqlens, PaddingInfo* info) {
  scan_counts(batch, cu_seqlens, info);
}

// Thread `mine` of `all`: zeros past the last token.
template <class I>
__device__ void clear_tail(const int32_t* cu_seqlens, int64_t batch, int64_t most, int64_t mine, int64_t all, I* x) {
  for (int64_t i = cu_seqlens[batch] + mine; i < most; i += all) x[i] = 0;
}

// Both index maps, and the first value that is neither 0 nor 1.
template <class M>
__global__ void __launch_bounds__(kThreads)
    index_maps_kernel(const M* mask, int64_t batch, int64_t seq, const int32_t* cu_seqlens, int64_t* to_padded,
                      int32_t* to_packed, PaddingInfo* info) {
  __shared__ int32_t warp_count[kThreads / 32];
  for (int64_t row = blockIdx.x; row < batch; row += gridDim.x) {
    int32_t next = cu_seqlens[row];
    for (int64_t first = 0; first < seq; first += kThreads) {
      const int64_t col = first + threadIdx.x, padded = row * seq + col;
      const M value = col >= seq ? M(0) : mask == nullptr ? M(1) : mask[padded];
      const bool keep = value != M(0);
      if (keep && value != M(1)) report_first(&info->bad_mask, padded);
      int total;
      const int32_t packed = next + rank_in_block(keep, warp_count, total);
      if (col < seq) to_packed[padded] = keep ? packed : -1;
      if (keep) to_padded[packed] = padded;
      next += total;
      __syncthreads();
    }
  }
  clear_tail(cu_seqlens, batch, batch * seq, int64_t{blockIdx.x} * kThreads + threadIdx.x,
             int64_t{gridDim.x} * kThreads, to_padded);
}

// The three kernels above for a small mask, a warp a sequence: they would be launches and little else.
template <class M>
__global__ void __launch_bounds__(kScanThreads)
    offsets_kernel(const M* mask, int64_t batch, int64_t seq, int32_t* cu_seqlens, int64_t* to_padded,
                   int32_t* to_packed, PaddingInfo* info) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto value_at = [&](int64_t row, int64_t col) {
    return col >= seq ? M(0) : mask == nullptr ? M(1) : mask[row * seq + col];
  };
  for (int64_t row = warp; row < batch; row += kScanThreads / 32) {
    int32_t count = 0;
    for (int64_t col = lane; col < seq; col += 32) count += value_at(row, col) != M(0);
    count = reduce<32>(count, Sum());
    if (lane == 0) cu_seqlens[row + 1] = count;
  }
  __syncthreads();
  scan_counts(batch, cu_seqlens, info);
  __syncthreads();
  for (int64_t row = warp; row < batch; row += kScanThreads / 32) {
    int32_t next = cu_seqlens[row];
    for (int64_t first = 0; first < seq; first += 32) {
      const int64_t col = first + lane, padded = row * seq + col;
      const M value = value_at(row, col);
      const bool keep = value != M(0);
      if (keep && value != M(1)) report_first(&info->bad_mask, padded);
      const unsigned ballot = __ballot_sync(kAllLanes, keep);
      const int32_t packed = next + __popc(ballot & ((1u << lane) - 1));
      if (col < seq) to_packed[padded] = keep ? packed : -1;
      if (keep) to_padded[packed] = padded;
      next += __popc(ballot);
    }
  }
  clear_tail(cu_seqlens, batch, batch * seq, threadIdx.x, kScanThreads, to_padded);
}

__global__ void __launch_bounds__(kThreads)
    check_ids_kernel(const int64_t* input_ids, const int64_t* token_type_ids, const int64_t* to_padded,
                     const int32_t* cu_seqlens, int64_t batch, int64_t most, int64_t vocab, int64_t token_types,
                     PaddingInfo* info) {
  const int64_t tokens = min(int64_t{cu_seqlens[batch]}, most);
  for (int64_t token = int64_t{blockIdx.x} * kThreads + threadIdx.x; token < tokens;
       token += int64_t{gridDim.x} * kThreads) {
    const int64_t at = to_padded ? to_padded[token] : token;
    const int64_t id = input_ids[at];
    if (id < 0 || id >= vocab) report_first(&info->bad_id, at);
    if (token_type_ids != nullptr && (token_type_ids[at] < 0 || token_type_ids[at] >= token_types))
      report_first(&info->bad_type, at);
  }
}

// The token's column: an absolute position, or what relative ones are made from.
__global__ void __launch_bounds__(kThreads)
    columns_kernel(const int64_t* to_padded, const int32_t* cu_seqlens, int64_t batch, int64_t seq, int64_t most,
                   int32_t* positions) {
  for (int64_t row = blockIdx.x; row < batch; row += gridDim.x) {
    const int64_t begin = cu_seqlens[row], end = min(int64_t{cu_seqlens[row + 1]}, most);
    for (int64_t token = begin + threadIdx.x; token < end; token += kThreads)
      positions[token] = static_cast<int32_t>(to_padded ? to_padded[token] - row * seq : token - begin);
  }
  clear_tail(cu_seqlens, batch, most, int64_t{blockIdx.x} * kThreads + threadIdx.x, int64_t{gridDim.x} * kThreads,
             positions);
}

// RoBERTa's: padding_id + how many ids up to and including this one are not padding_id, itself padding_id where the id
// is. HuggingFace counts ids, not the mask, so a masked column with a real id counts too: the whole row is walked.
__global__ void __launch_bounds__(kThreads)
    positions_from_padding_kernel(const int64_t* input_ids, const int64_t* to_padded, const int32_t* cu_seqlens,
                                  int64_t batch, int64_t seq, int64_t padding_id, int64_t most, int32_t* positions) {
  __shared__ int32_t warp_count[kThreads / 32];
  __shared__ int32_t position_of[kThreads];  // of the columns in this round
  for (int64_t row = blockIdx.x; row < batch; row += gridDim.x) {
    const int64_t begin = cu_seqlens[row], end = min(int64_t{cu_seqlens[row + 1]}, most);
    const int64_t columns = to_padded ? seq : end - begin;
    const int64_t* ids = input_ids + (to_padded ? row * seq : begin);
    int64_t token = begin;  // the first kept token not yet done
    int64_t counted = 0;
    for (int64_t first = 0; first < columns && token < end; first += kThreads) {
      const int64_t col = first + threadIdx.x;
      const bool real = col < columns && ids[col] != padding_id;
      int total;
      const int rank = rank_in_block(real, warp_count, total);
      const int64_t position = padding_id + (real ? counted + rank + 1 : 0);
      position_of[threadIdx.x] = static_cast<int32_t>(min(position, int64_t{INT32_MAX}));
      __syncthreads();
      // Kept tokens have ascending columns, so at most kThreads of them lie in this round.
      const int64_t mine = token + threadIdx.x;
      const int64_t column = mine >= end ? columns + kThreads : to_padded ? to_padded[mine] - row * seq : mine - begin;
      const bool here = column < first + kThreads;
      if (here) positions[mine] = position_of[column - first];
      counted += total;
      token += __syncthreads_count(here);
    }
  }
  clear_tail(cu_seqlens, batch, most, int64_t{blockIdx.x} * kThreads + threadIdx.x, int64_t{gridDim.x} * kThreads,
             positions);
}

// Where the sequence that has this token begins.
__device__ int64_t start_of_sequence(const int32_t* cu_seqlens, int64_t batch, int64_t token) {
  int64_t low = 0, high = batch;  // cu_seqlens[low] <= token < cu_seqlens[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (cu_seqlens[middle] <= token ? low : high) = middle;
  }
  return cu_seqlens[low];
}

__global__ void __launch_bounds__(kThreads)
    stage_kernel(const int64_t* input_ids, const int64_t* token_type_ids, const int64_t* to_padded,
                 const int32_t* cu_seqlens, int64_t tokens, int64_t batch, int64_t seq, int64_t most_tokens,
                 int64_t most_batch, int64_t* staged_ids, int64_t* staged_types, int32_t* columns,
                 int32_t* staged_cu_seqlens) {
  const int64_t items = max(most_tokens, most_batch + 1);
  tokens = min(tokens, int64_t{cu_seqlens[batch]});
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < items; i += int64_t{gridDim.x} * kThreads) {
    if (i < most_tokens) {
      const bool kept = i < tokens;
      const int64_t source = !kept ? 0 : to_padded != nullptr ? to_padded[i] : i;
      staged_ids[i] = kept ? input_ids[source] : 0;
      staged_types[i] = kept && token_type_ids != nullptr ? token_type_ids[source] : 0;
      if (columns != nullptr) {
        int64_t column = 0;
        if (kept) column = to_padded != nullptr ? source % seq : i - start_of_sequence(cu_seqlens, batch, i);
        columns[i] = static_cast<int32_t>(column);
      }
    }
    if (i <= most_batch) staged_cu_seqlens[i] = cu_seqlens[min(i, batch)];
  }
}

// A block to a sequence.
__global__ void token_factors_kernel(const int64_t* input_ids, const int64_t* to_padded, const int32_t* cu_seqlens,
                                     int64_t batch, int64_t mask_id, float kept, int64_t most, float* factors) {
  for (int64_t b = blockIdx.x; b < batch; b += gridDim.x) {
    const int64_t begin = cu_seqlens[b], end = cu_seqlens[b + 1];
    const auto masked = [&](int64_t t) { return input_ids[to_padded ? to_padded[t] : t] == mask_id; };
    int count = 0;
    for (int64_t first = begin; first < end; first += blockDim.x) {
      const int64_t t = first + threadIdx.x;
      count += __syncthreads_count(t < end && masked(t));
    }
    const float share = static_cast<float>(count) / static_cast<float>(end - begin);
    for (int64_t t = begin + threadIdx.x; t < end; t += blockDim.x)
      factors[t] = masked(t) ? 0.0f : kept / (1.0f - share);
  }
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t t = cu_seqlens[batch] + int64_t{blockIdx.x} * blockDim.x + threadIdx.x; t < most; t += step)
    factors[t] = 0.0f;
}

}  // namespace

template <class Device, class M>
void padding_offsets(Context<Device>& context, const M* mask, int64_t batch, int64_t seq, int32_t* cu_seqlens,
                     int64_t* to_padded, int32_t* to_packed, PaddingInfo* info) {
  if (batch * seq <= kOneBlock && batch <= kOneBlock)
    return launch_kernel(context, "kernel padding_offsets", offsets_kernel<M>, 1, kScanThreads, mask, batch, seq,
                         cu_seqlens, to_padded, to_packed, info);
  const unsigned blocks = grid(batch, context.sm_count);
  launch_kernel(context, "kernel padding_offsets (count)", count_kept_kernel<M>, blocks, kThreads, mask, batch, seq,
                cu_seqlens);
  launch_kernel(context, "kernel padding_offsets (scan)", scan_counts_kernel, 1, kScanThreads, batch, cu_seqlens, info);
  if (seq == 0) return;
  launch_kernel(context, "kernel padding_offsets (index maps)", index_maps_kernel<M>, blocks, kThreads, mask, batch,
                seq, cu_seqlens, to_padded, to_packed, info);
}

template <>
void padding_check_ids(Context<Cuda>& context, const int64_t* input_ids, const int64_t* token_type_ids,
                       const int64_t* to_padded, const int32_t* cu_seqlens, int64_t batch, int64_t most, int64_t vocab,
                       int64_t token_types, PaddingInfo* info) {
  if (batch == 0 || most == 0) return;
  // A model without token types never reads them.
  const int64_t* types = token_types > 0 ? token_type_ids : nullptr;
  launch_kernel(context, "kernel padding_check_ids", check_ids_kernel,
                grid((most + kThreads - 1) / kThreads, context.sm_count), kThreads, input_ids, types, to_padded,
                cu_seqlens, batch, most, vocab, token_types, info);
}

template <>
void padding_stage(Context<Cuda>& context, const int64_t* input_ids, const int64_t* token_type_ids,
                   const int64_t* to_padded, const int32_t* cu_seqlens, int64_t tokens, int64_t batch, int64_t seq,
                   int64_t most_tokens, int64_t most_batch, int64_t* staged_ids, int64_t* staged_types,
                   int32_t* columns, int32_t* staged_cu_seqlens) {
  const int64_t items = std::max(most_tokens, most_batch + 1);
  launch_kernel(context, "kernel padding_stage", stage_kernel,
                grid((items + kThreads - 1) / kThreads, context.sm_count), kThreads, input_ids, token_type_ids,
                to_padded, cu_seqlens, tokens, batch, seq, most_tokens, most_batch, staged_ids, staged_types, columns,
                staged_cu_seqlens);
}

template <>
void padding_positions(Context<Cuda>& context, PositionKind kind, const int64_t* input_ids, const int64_t* to_padded,
                       const int32_t* cu_seqlens, int64_t batch, int64_t seq, int64_t padding_id, int64_t most,
                       int32_t* positions) {
  if (most == 0) return;
  const unsigned blocks = grid(batch, context.sm_count);
  if (kind != PositionKind::from_padding)
    launch_kernel(context, "kernel padding_positions", columns_kernel, blocks, kThreads, to_padded, cu_seqlens, batch,
                  seq, most, positions);
  else
    launch_kernel(context, "kernel padding_positions", positions_from_padding_kernel, blocks, kThreads, input_ids,
                  to_padded, cu_seqlens, batch, seq, padding_id, most, positions);
}

template <>
void token_factors(Context<Cuda>& context, const int64_t* input_ids, const int64_t* to_padded,
                   const int32_t* cu_seqlens, int64_t batch, int64_t mask_id, float kept, int64_t most,
                   float* factors) {
  if (most == 0) return;
  launch_kernel(context, "kernel token_factors", token_factors_kernel, grid(batch, context.sm_count), kThreads,
                input_ids, to_padded, cu_seqlens, batch, mask_id, kept, most, factors);
}

#define FTBERT_INSTANTIATE(M) \
  template void padding_offsets(Context<Cuda>&, const M*, int64_t, int64_t, int32_t*, int64_t*, int32_t*, PaddingInfo*);
FTBERT_INSTANTIATE(uint8_t)
FTBERT_INSTANTIATE(int64_t)
FTBERT_INSTANTIATE(float)
#undef FTBERT_INSTANTIATE

}  // namespace ftbert
