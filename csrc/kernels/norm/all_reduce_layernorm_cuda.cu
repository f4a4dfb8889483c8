// out = norm(sum over ranks of x + bias + input), each rank reading the parts of all, or having them sent: a one-shot
// all-reduce, bias, residual and norm in one kernel.
#include "core/check.h"
#include "core/cuda_check.h"
#include "core/dispatch.h"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/peers.cuh"
#include "kernels/kernels.h"
#include "kernels/norm/norm_row.cuh"

namespace ftbert {
namespace {

// Sends this rank's part of a row to the others.
template <class Shape, class E>
__device__ void send_row(const PeerParts& all, int64_t at, int cols, int lane) {
  Packed<E, Shape::kWidth> packs[Shape::kPacks];
  load_row<Shape>(static_cast<const E*>(all.parts[all.rank]) + at, cols, lane, packs);
  for (int other = 0; other < all.size; ++other) {
    if (other == all.rank) continue;
#pragma unroll
    for (int i = 0; i < Shape::kPacks; ++i) {
      const int col = (i * Shape::kThreads + lane) * Shape::kWidth;
      if (col < cols) send_words(inbox_place(all, other, all.rank, (at + col) * sizeof(E)), packs[i].bits);
    }
  }
}

// What another rank has sent of a row, when it has come.
template <class Shape, class E>
__device__ void receive_row(const PeerParts& all, int from, int64_t at, int cols, int lane,
                            Packed<E, Shape::kWidth> (&packs)[Shape::kPacks]) {
  const auto each = [&](const auto& visit) {
#pragma unroll
    for (int i = 0; i < Shape::kPacks; ++i) {
      const int col = (i * Shape::kThreads + lane) * Shape::kWidth;
      if (col < cols) visit(packs[i], inbox_place(all, all.rank, from, (at + col) * sizeof(E)));
    }
  };
#pragma unroll
  for (int i = 0; i < Shape::kPacks; ++i) packs[i] = Packed<E, Shape::kWidth>::zero();
  PeerWait wait(all);
  bool came;
  do {
    came = true;
    each([&](auto& pack, const void* there) { came = receive_words(there, pack.bits) && came; });
  } while (!came && wait.goes_on());
  each([](auto&, void* there) { forget_words(there); });
}

// The sum of this thread's packs of a row, by rank, so that every rank adds in the same order.
template <class Shape, class E>
__device__ void add_parts(const PeerParts& all, int64_t at, int cols, int lane,
                          float (&x)[Shape::kPacks][Shape::kWidth]) {
  constexpr int W = Shape::kWidth, P = Shape::kPacks;
  Packed<E, W> packs[2][P];  // under way at once
  const auto load = [&](int rank, Packed<E, W>(&to)[P]) {
    if (all.inbox_bytes > 0 && rank != all.rank)
      receive_row<Shape>(all, rank, at, cols, lane, to);
    else
      load_row<Shape>(static_cast<const E*>(all.parts[rank]) + at, cols, lane, to);
  };
  load(0, packs[0]);
  load(1, packs[1]);
#pragma unroll
  for (int i = 0; i < P; ++i) {
    packs[0][i].to_floats(x[i]);
    packs[1][i].add_to(x[i]);
  }
#pragma unroll 1
  for (int rank = 2; rank < all.size; ++rank) {
    load(rank, packs[0]);
#pragma unroll
    for (int i = 0; i < P; ++i) packs[0][i].add_to(x[i]);
  }
}

// A row's vectors in shared memory, [3][cols]; in registers they would leave room for half as many rows.
template <class E>
struct SharedVectors {
  E* rows;

  // Asks for them; what is null becomes zeros. They are there after `come` and a barrier of the block.
  __device__ void ask(int which, const E* from, int cols) const {
    constexpr int W = kWidth<E>;
    for (int col = static_cast<int>(threadIdx.x) * W; col < cols; col += static_cast<int>(blockDim.x) * W) {
      E* const to = rows + which * cols + col;
      if (from != nullptr)
        copy_async16(shared_address(to), from + col, true);
      else
        Packed<E, W>::zero().store(to);
    }
  }
  __device__ static void come() {
    copy_async_commit();
    copy_async_wait<0>();
  }
};

// Copy: nothing, or E4m3Rows or ByteRows, and then out may be null. sum and out may alias input.
template <class Shape, class E, class Rule, class... Copy>
__global__ void __launch_bounds__(Shape::kMaxThreads, 1)
    all_reduce_layernorm_kernel(const PeerParts parts, const E* bias, const E* input, const E* gamma, const E* beta,
                                float eps, int64_t rows, int cols, E* sum, E* out, float offset, Copy... copy) {
  constexpr int W = Shape::kWidth, P = Shape::kPacks;
  const Rule rule{eps, offset};
  const PeerMeeting others(parts);
  RowWalk<Shape> walk;
  extern __shared__ __align__(16) char shared[];
  const SharedVectors<E> vectors{reinterpret_cast<E*>(shared)};
  vectors.ask(0, bias, cols), vectors.ask(1, gamma, cols), vectors.ask(2, beta, cols);
  wait_for_inputs();
  const auto send = [&](int64_t row) {
    if (parts.inbox_bytes > 0 && row < rows) send_row<Shape, E>(parts, row * cols, cols, walk.lane);
  };
  send(walk.row);
  (copy.read_scale(), ...);
  Packed<E, W> c[P];  // of the next row; the first comes while the others are awaited
  const auto load_input = [&] {
    load_row<Shape>(input && walk.row < rows ? input + walk.row * cols : nullptr, cols, walk.lane, c);
  };
  load_input();
  vectors.come();
  others.meet();
  while (walk.row < rows) {
    const int64_t at = walk.row * cols;
    (copy.begin_row(walk.row), ...);
    send(walk.row + walk.step);  // while this one is awaited
    float x[P][W];
    add_parts<Shape, E>(parts, at, cols, walk.lane, x);
    const auto first = [&](int i, float (&of_x)[W]) {
#pragma unroll
      for (int w = 0; w < W; ++w) of_x[w] = x[i][w];
    };
    Packed<E, W> b[P], g[P], h[P];
    load_row<Shape>(vectors.rows, cols, walk.lane, b);
    load_row<Shape>(vectors.rows + cols, cols, walk.lane, g);
    load_row<Shape>(vectors.rows + 2 * cols, cols, walk.lane, h);
    norm_packs<Shape>(first, b, c, g, h, !std::is_same_v<Rule, NoRule>, rule, cols, walk.lane, sum ? sum + at : nullptr,
                      out, at, copy...);
    walk.row += walk.step;
    load_input();
  }
}

// Bytes of a row's vectors, which with the kernel's own are more than a launch has unasked.
constexpr int kMostVectors = 3 * 1024 * 16;

// Few shapes: a sum over GPUs takes longer than what a better one saves.
template <int kWidth, class Launch>
void with_shape(int64_t cols, const Launch& launch) {
  const int64_t packs = cols / kWidth;
  if (packs <= 128) return launch(RowShape<kWidth, 32, 4>());
  if (packs <= 512) return launch(RowShape<kWidth, 256, 2>());
  launch(RowShape<kWidth, 256, 4>());
}

}  // namespace

template <class T>
void add_bias_input_layernorm(Context<Cuda>& context, const PartialSums<T>& x, const T* bias, const T* input,
                              const Norm<T>& norm, int64_t rows, int64_t cols, const Output<T>& to) {
  if (rows == 0 || cols == 0) return;
  const Operand copy = to.copy.scaled() ? to.copy : Operand();
  T *const sum = to.sum, *const out = copy ? to.normed : to.only_norm();
  FTBERT_CHECK(adds_parts<T>(cols) && vectorizable(kWidth<T>, cols, bias, input, norm.gamma, norm.beta, sum, out) &&
                   is_wide(copy),
               "a sum over ranks: expected rows and vectors that begin at 16 bytes, of up to 16 KiB, got ", cols,
               " columns");
  with_copy<T>(copy, cols, [&]<class... Copy>(const Copy&... beside) {
    with_shape<kWidth<T>>(cols, [&]<class Shape>(Shape) {
      with_norm_rule(norm, [&]<class Rule>() {
        const auto kernel = all_reduce_layernorm_kernel<Shape, native_t<T>, Rule, Copy...>;
        const size_t shared = 3 * cols * sizeof(T);
        // launch_overlapped sets this too; the occupancy is asked before it.
        FTBERT_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostVectors));
        int fitting = 0;
        FTBERT_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fitting, kernel, Shape::kMaxThreads, shared));
        RowLaunch on = row_launch<Shape>(rows, context.sm_count);
        on.blocks = std::min(on.blocks, static_cast<unsigned>(fitting * context.sm_count));
        launch_overlapped(context, "kernel all_reduce_layernorm", kernel, on.blocks, on.threads,
                          SharedBytes(shared, kMostVectors), 1, static_cast<const PeerParts&>(x), native(bias),
                          native(input), native(norm.gamma), native(norm.beta), norm.eps, rows, cols, native(sum),
                          native(out), norm.offset, beside...);
      });
    });
  });
}

#define FTBERT_INSTANTIATE(T)                                                                                       \
  template void add_bias_input_layernorm(Context<Cuda>&, const PartialSums<T>&, const T*, const T*, const Norm<T>&, \
                                         int64_t, int64_t, const Output<T>&);
FTBERT_CUDA_TYPES(FTBERT_INSTANTIATE)

}  // namespace ftbert
