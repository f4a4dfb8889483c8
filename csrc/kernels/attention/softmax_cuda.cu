// probabilities = softmax(scale * scores, capped, + relative bias) over the keys that each row's query sees.
#include <cmath>

#include "core/check.h"
#include "core/dispatch.h"
#include "device/launch.cuh"
#include "device/row_shape.cuh"
#include "device/vector.cuh"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

constexpr int kSoftmaxWidth = kWidth<float>;  // scores are float; an access to half probabilities is 8 bytes

// What turns a score of one query into a logit.
template <class E>
struct Logits {
  const float* scores;     // [seq], this query's
  const E* bias;           // [2*span-1] of this head, moved so that bias[0] is distance 0; or nullptr
  const int32_t* columns;  // [length] of this sequence, or nullptr
  float scale, soft_cap;
  int begin, end;  // of the keys that the query sees
  int query;       // this one's column
  int farthest;    // larger distances are read as this one

  // -inf at all other keys, whatever stands there: NaN must not leak out of padding.
  template <int W>
  __device__ void from_scores(int key, const Packed<float, W>& pack, float (&x)[W]) const {
    pack.to_floats(x);
#pragma unroll
    for (int w = 0; w < W; ++w) {
      const auto added = [&] { return to_float(bias[distance(columns ? columns[key + w] : key + w)]); };
      if (key + w < begin || key + w >= end)
        x[w] = -INFINITY;
      else if (soft_cap > 0)
        x[w] = soft_cap * tanhf(scale * x[w] / soft_cap) + (bias != nullptr ? added() : 0);
      else if (bias != nullptr)
        x[w] = scale * x[w] + added();
      else
        x[w] *= scale;
    }
  }
  __device__ int distance(int column) const { return max(-farthest, min(column - query, farthest)); }
  template <int W>
  __device__ void load(int key, float (&x)[W]) const {
    from_scores(key, Packed<float, W>::load(scores + key), x);
  }
};

// The row in registers: one read, one write; also in place.
template <class Shape, class E>
__device__ void softmax_registers(const Logits<E>& logits, int seq, int lane, E* out) {
  constexpr int W = Shape::kWidth, P = Shape::kPacks;
  Packed<float, W> packs[P];  // all loads are in flight before the first is used
#pragma unroll
  for (int i = 0; i < P; ++i) {
    const int key = (i * Shape::kThreads + lane) * W;
    packs[i] = key < logits.end ? Packed<float, W>::load(logits.scores + key) : Packed<float, W>::zero();
  }
  float x[P][W];
  float highest = -INFINITY;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    logits.from_scores((i * Shape::kThreads + lane) * W, packs[i], x[i]);
#pragma unroll
    for (int w = 0; w < W; ++w) highest = fmaxf(highest, x[i][w]);
  }
  highest = reduce<Shape::kThreads>(highest, Max());
  float total = 0;
#pragma unroll
  for (int i = 0; i < P; ++i) {
#pragma unroll
    for (int w = 0; w < W; ++w) {
      x[i][w] = expf(x[i][w] - highest);
      total += x[i][w];
    }
  }
  total = reduce<Shape::kThreads>(total, Sum());
  const float inverse = 1.0f / total;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    const int key = (i * Shape::kThreads + lane) * W;
    if (key >= seq) break;
#pragma unroll
    for (int w = 0; w < W; ++w) x[i][w] *= inverse;
    Packed<E, W>::from_floats(x[i]).store(out + key);
  }
}

// A row too long for registers: three reads. Each thread stores only what it alone has read, so in place works too.
template <class Shape, class E>
__device__ void softmax_long(const Logits<E>& logits, int seq, int lane, E* out) {
  constexpr int W = Shape::kWidth, kStep = Shape::kThreads * W;
  float x[W];
  float highest = -INFINITY, total = 0;
  for (int key = lane * W; key < logits.end; key += kStep) {
    logits.load(key, x);
#pragma unroll
    for (int w = 0; w < W; ++w) highest = fmaxf(highest, x[w]);
  }
  highest = reduce<Shape::kThreads>(highest, Max());
  for (int key = lane * W; key < logits.end; key += kStep) {
    logits.load(key, x);
#pragma unroll
    for (int w = 0; w < W; ++w) total += expf(x[w] - highest);
  }
  const float inverse = 1.0f / reduce<Shape::kThreads>(total, Sum());
  for (int key = lane * W; key < seq; key += kStep) {
#pragma unroll
    for (int w = 0; w < W; ++w) x[w] = -INFINITY;
    if (key < logits.end) logits.load(key, x);
#pragma unroll
    for (int w = 0; w < W; ++w) x[w] = expf(x[w] - highest) * inverse;
    Packed<E, W>::from_floats(x).store(out + key);
  }
}

template <class Shape, class E>
__global__ void __launch_bounds__(Shape::kMaxThreads)
    softmax_kernel(const float* scores, const int32_t* cu_seqlens, const int32_t* end_k, float scale, float soft_cap,
                   Window window, const E* relative_bias, const int32_t* columns, int64_t span, int64_t rows, int heads,
                   int seq, E* probabilities) {
  for (RowWalk<Shape> walk; walk.row < rows; walk.row += walk.step) {
    const int64_t matrix = walk.row / seq;  // sequence * heads + head
    const int query = static_cast<int>(walk.row % seq);
    const int64_t begin = cu_seqlens[matrix / heads];
    const int length = min(static_cast<int>(cu_seqlens[matrix / heads + 1] - begin), seq);
    E* out = probabilities + walk.row * seq;
    const int keys = min(static_cast<int>(end_k[matrix / heads] - begin), seq);
    if (query >= length || window.begin(query) >= window.end(query, keys)) {
      for (int key = walk.lane * Shape::kWidth; key < seq; key += Shape::kThreads * Shape::kWidth)
        Packed<E, Shape::kWidth>::zero().store(out + key);
      continue;
    }
    Logits<E> logits{scores + walk.row * seq,
                     nullptr,
                     columns ? columns + begin : nullptr,
                     scale,
                     soft_cap,
                     window.begin(query),
                     window.end(query, keys),
                     query,
                     0};
    if (relative_bias != nullptr) {
      logits.bias = relative_bias + matrix % heads * (2 * span - 1) + (span - 1);
      logits.farthest = static_cast<int>(span - 1);
      if (columns) logits.query = logits.columns[query];
    }
    if constexpr (Shape::kPacks > 0)
      softmax_registers<Shape>(logits, seq, walk.lane, out);
    else
      softmax_long<Shape>(logits, seq, walk.lane, out);
  }
}

}  // namespace

template <class Device, class T>
void softmax(Context<Device>& context, const Heads& heads, const float* scores, const Sequences& sequences,
             const ScorePolicy<T>& policy, T* probabilities) {
  const auto read = policy.template read<kSoftmaxReads>("softmax");
  const RelativeBias<T>& bias = read.template get<ScoreMember::bias>();
  const float soft_cap = read.template get<ScoreMember::soft_cap>().value;
  const int64_t seq = sequences.max_k, rows = sequences.count * heads.count * seq;
  if (rows == 0) return;
  FTBERT_CHECK(seq < (1 << 30), "softmax: a row has at most 2^30 elements, got ", seq);
  const auto launch = [&](auto shape) {
    using Shape = decltype(shape);
    const RowLaunch on = row_launch<Shape>(rows, context.sm_count);
    launch_kernel(context, "kernel softmax", softmax_kernel<Shape, native_t<T>>, on.blocks, on.threads, scores,
                  sequences.cu_q, sequences.end_of_keys(), heads.scale, soft_cap,
                  read.template get<ScoreMember::window>(), native(bias.table), bias.columns, bias.span, rows,
                  heads.count, seq, native(probabilities));
  };
  const bool wide = vectorizable(kSoftmaxWidth, seq, scores) && vectorizable(kSoftmaxWidth, seq, probabilities);
  with_row_shape<kSoftmaxWidth>(wide, seq, launch);
}

FTBERT_INSTANTIATE_CUDA(softmax, Cuda)

}  // namespace ftbert
