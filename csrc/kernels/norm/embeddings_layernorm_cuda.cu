// out[t] = norm(scale * word[id] + token_type[type] + position[p]), gathered straight into packed rows.
#include <cmath>

#include "core/check.h"
#include "core/dispatch.h"
#include "device/launch.cuh"
#include "kernels/kernels.h"
#include "kernels/norm/norm_row.cuh"

namespace ftbert {
namespace {

// Row `index` of a table, nullptr where there is no table. Clears `inside` where the index lies outside.
template <class E>
__device__ const E* table_row(const E* table, int64_t index, int64_t rows, int cols, bool& inside) {
  if (table == nullptr) return nullptr;
  if (index < 0 || index >= rows) inside = false;
  return table + index * cols;
}

// What kernels read of EmbeddingTables.
template <class E>
struct Tables {
  const E *word, *position, *token_type;
  int64_t vocab, max_positions, token_types;
  Norm<E> norm;
};

template <class Shape, class E, class... Copy>
__global__ void __launch_bounds__(Shape::kMaxThreads)
    embeddings_layernorm_kernel(Tables<E> tables, const int64_t* input_ids, const int64_t* token_type_ids,
                                const int64_t* to_padded, const int32_t* positions, int64_t tokens, int cols, E* out,
                                Copy... copy) {
  (copy.read_scale(), ...);
  for (RowWalk<Shape> walk; walk.row < tokens; walk.row += walk.step) {
    const int64_t at = to_padded ? to_padded[walk.row] : walk.row;
    bool inside = true;
    const E* word = table_row(tables.word, input_ids[at], tables.vocab, cols, inside);
    const E* type =
        table_row(tables.token_type, token_type_ids ? token_type_ids[at] : 0, tables.token_types, cols, inside);
    const E* position =
        table_row(tables.position, positions ? int64_t{positions[walk.row]} : 0, tables.max_positions, cols, inside);
    const int64_t row = walk.row * cols;
    (copy.begin_row(walk.row), ...);
    if (inside) {
      norm_row<Shape>(word, type, position, tables.norm.gamma, tables.norm.beta, LayerRule{tables.norm.eps, 0}, cols,
                      walk.lane, static_cast<E*>(nullptr), out, row, copy...);
    } else {
      // No host may be asked here; NaN cannot be mistaken for an embedding.
      for (int col = walk.lane; col < cols; col += Shape::kThreads) put_norm({NAN}, out, row, col, copy...);
      (copy.spoil_row(cols, walk.lane, Shape::kThreads), ...);
    }
  }
}

constexpr int kScaledThreads = 256;

// W numbers of a row of a word table in int8.
template <int W>
__device__ void load_int8(const int8_t* from, float (&x)[W]) {
  if constexpr (W == 1) {
    x[0] = *from;
  } else {
    const auto pack = *reinterpret_cast<const std::conditional_t<W == 8, uint2, uint32_t>*>(from);
    const char* const numbers = reinterpret_cast<const char*>(&pack);
#pragma unroll
    for (int w = 0; w < W; ++w) x[w] = static_cast<int8_t>(numbers[w]);
  }
}

// The sum alone; the scaled row is rounded to E before it is added to, and so is a scale that all tokens share. Of
// words in int8, with a scale for each row of the table, nothing is rounded before the sum. kInt8: word lies so.
template <int W, class E, bool kInt8>
__global__ void __launch_bounds__(kScaledThreads)
    scaled_embeddings_kernel(Tables<E> tables, const float* word_scales, float scale, const float* factors,
                             const int64_t* input_ids, const int64_t* token_type_ids, const int64_t* to_padded,
                             const int32_t* positions, int64_t tokens, int cols, E* out) {
  using Pack = Packed<E, W>;
  using Word = std::conditional_t<kInt8, int8_t, E>;
  const float rounded = to_float(from_float<E>(scale));
  for (int64_t t = blockIdx.x; t < tokens; t += gridDim.x) {
    const int64_t at = to_padded ? to_padded[t] : t;
    float factor = factors ? scale * factors[t] : kInt8 ? scale : rounded;
    bool inside = true;
    const Word* word = table_row(reinterpret_cast<const Word*>(tables.word), input_ids[at], tables.vocab, cols, inside);
    if (kInt8 && inside) factor *= word_scales[input_ids[at]];
    const E* type =
        table_row(tables.token_type, token_type_ids ? token_type_ids[at] : 0, tables.token_types, cols, inside);
    const E* position =
        table_row(tables.position, positions ? int64_t{positions[t]} : 0, tables.max_positions, cols, inside);
    for (int col = threadIdx.x * W; col < cols; col += blockDim.x * W) {
      float x[W];
      if (inside) {
        if constexpr (kInt8)
          load_int8(word + col, x);
        else
          Pack::load(word + col).to_floats(x);
#pragma unroll
        for (int w = 0; w < W; ++w) {
          x[w] = __fmul_rn(x[w], factor);  // no part of an FMA
          if (!kInt8) x[w] = to_float(from_float<E>(x[w]));
        }
        const auto add = [&](const E* other) {
          if (other == nullptr) return;
          float y[W];
          Pack::load(other + col).to_floats(y);
#pragma unroll
          for (int w = 0; w < W; ++w) x[w] += y[w];
        };
        add(type);
        add(position);
      } else {
#pragma unroll
        for (int w = 0; w < W; ++w) x[w] = NAN;
      }
      Pack::from_floats(x).store(out + t * cols + col);
    }
  }
}

}  // namespace

template <class Device, class T>
void embeddings_layernorm(Context<Device>& context, const EmbeddingTables<T>& tables, const int64_t* input_ids,
                          const int64_t* token_type_ids, const int64_t* to_padded, const int32_t* positions,
                          int64_t tokens, int64_t cols, T* out, const Operand& copy, const float* factors) {
  if (tokens == 0 || cols == 0) return;
  FTBERT_CHECK(cols < (1 << 30), "embeddings_layernorm: a row has at most 2^30 elements, got ", cols);
  FTBERT_CHECK(!tables.position || positions,
               "embeddings_layernorm: the model has a position table, but no positions given");
  using E = native_t<T>;
  const Norm<T>& norm = tables.norm;  // without a gamma: none
  const bool int8 = tables.word.format == &formats::int8;
  const T* const word = int8 ? static_cast<const T*>(tables.word.data) : tables.word.template as<T>();
  const Tables<E> on_device{native(word),
                            native(tables.position),
                            native(tables.token_type),
                            tables.vocab,
                            tables.max_positions,
                            tables.token_types,
                            {norm.kind, native(norm.gamma), native(norm.beta), norm.eps}};
  if (tables.scale != 1 || factors || norm.kind == NormKind::rms || int8) {
    with_width<kWidth<T>>(vectorizable(kWidth<T>, cols, word, tables.position, tables.token_type, out), [&]<int W>() {
      const int64_t warps = std::min<int64_t>((cols + 32 * W - 1) / (32 * W), kScaledThreads / 32);
      const auto kernel = int8 ? scaled_embeddings_kernel<W, E, true> : scaled_embeddings_kernel<W, E, false>;
      launch_kernel(context, "kernel embeddings_layernorm", kernel,
                    static_cast<unsigned>(std::min<int64_t>(tokens, INT_MAX)), static_cast<unsigned>(32 * warps),
                    on_device, tables.word.scale, tables.scale, factors, input_ids, token_type_ids, to_padded,
                    positions, tokens, cols, native(out));
    });
    if (norm)
      add_bias_input_layernorm<Device, T>(context, out, nullptr, nullptr, norm, tokens, cols,
                                          {.normed = out, .copy = copy});
    else if (copy)
      quantise<Device, T>(context, out, tokens, cols, copy);
    return;
  }
  const auto launch = [&]<class Shape, class... Copy>(Shape, const Copy&... beside) {
    const RowLaunch on = row_launch<Shape>(tokens, context.sm_count);
    launch_kernel(context, "kernel embeddings_layernorm", embeddings_layernorm_kernel<Shape, E, Copy...>, on.blocks,
                  on.threads, on_device, input_ids, token_type_ids, to_padded, positions, tokens, cols, native(out),
                  beside...);
  };
  const bool wide =
      vectorizable(kWidth<T>, cols, word, tables.position, tables.token_type, norm.gamma, norm.beta, out) &&
      is_wide(copy);
  with_copy<T>(copy, cols, [&](const auto&... beside) {
    with_row_shape<kWidth<T>>(wide, cols, [&](auto shape) { launch(shape, beside...); });
  });
}

FTBERT_INSTANTIATE_CUDA(embeddings_layernorm, Cuda)

}  // namespace ftbert
