// The registry of our own kernels for matrix products. No CUDA header.
#pragma once
#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>

#include "core/context.h"
#include "core/edge.h"
#include "gemm/gemm.h"
#include "gemm/product.h"

namespace ftbert {

inline constexpr int64_t kLeastWorkspaceBytes = 4 << 20;  // of Context::gemm_workspace, on every GPU

// The same over vectors of another type, which kernels know.
template <class To, class From>
Norm<To> norm_over(const Norm<From>& norm) {
  const auto vector = [](const void* p) { return static_cast<const To*>(p); };
  return {norm.kind, vector(norm.gamma), vector(norm.beta), norm.eps, norm.offset, norm.rounding};
}
template <class To, class From>
HeadRules<To> rules_over(const HeadRules<From>& rules) {
  return {norm_over<To>(rules.q_norm), norm_over<To>(rules.k_norm), rules.rotation, rules.positions};
}

// A norm still pending on x. Memory holds x * gamma, gamma [n] of make_sum_vectors; the norm's input is that times
// *unscale. gamma nullptr: memory holds x, and no norm is pending.
struct PendingNorm {
  const float* gamma = nullptr;
  const float* unscale = nullptr;
  RowMoments moments;
  float eps = 0;
};

// What a product by moments reads beside its operands (deferred_norm.h).
struct MomentData {
  const float* add = nullptr;    // [n], holds the bias
  const float* slope = nullptr;  // [n], with Before::norm_by_moments
  const float* scale = nullptr;  // [n], of operands in E4M3, in place of their scales
  const float* gamma = nullptr;  // [n], of the norm behind the residual sum
  PendingNorm pending;           // on a, or with a residual on that
  // [m, n]; with After::moments_beside it becomes the sum. It and its moments are read before the kernel ahead has
  // ended, so they must be there before that one.
  const void* residual = nullptr;
  RowMoments moments;  // which a product behind a norm clears, and one ahead adds those of its sum to
};

// Where a product's operands lie, all aligned to 16 bytes; shapes as in Product. Of a, and of c where it is a residual
// that a norm follows, memory for rows_in_tiles(m) rows is there.
struct ProductData {
  const void* a = nullptr;
  const void* b = nullptr;
  const void* bias = nullptr;  // [n], or nullptr where the epilogue has none
  void* c = nullptr;           // also the residual, but of products by moments
  void* sums = nullptr;        // [m, n], room for what add_bias_gate reads where a kernel leaves the gate to it
  // Of E4M3 numbers, each the scale times what is stored. They lie on the device and are known before the call: kernels
  // read them, as the bias, while the kernel ahead may still be at work.
  const float* a_scale = nullptr;  // one
  const float* b_scale = nullptr;  // one, or those of rows [n], by b's format
  const float* c_scale = nullptr;  // one
  DType stream = DType::fp16;      // fp16 or bf16, of products of E4M3: the bias's type
  // Before::norm_rows: of vectors [k]. After::norm and norm_beside: of vectors [n], and what contained_norm.h says.
  Norm<void> norm = {};
  // [m, n], the norm: with After::norm_beside. In c's type; or, of a product of E4M3, with a scale in E4M3, and then
  // with After::norm too, beside c. With After::moments of such a product: c in E4M3, if anybody reads it.
  void* copy = nullptr;
  const float* copy_scale = nullptr;  // one
  ExchangedMoments moments = {};
  MomentData by_moments = {};
  Heads heads = {};  // with Epilogue::heads
  HeadRules<void> rules = {};
  // Of few_rows, 0 before and after; products that may run at the same time need different ones, two by turns are
  // enough for a stream of kernels that overlap. With it, blocks take tiles of b's rows as they get to them; with
  // nullptr, and of few_rows_lanes, all have as many.
  uint32_t* tile_count = nullptr;
};

// A block's tile of c, and over how many blocks its k is split.
struct Tile {
  int rows = 0, columns = 0, split = 1;
};

// One instance of a kernel. Its name says the tile: "64x96", "64x96 k4" where k is split over 4 blocks, and one more
// word for what tells it from others of that tile. Tables store names.
class OwnVariant {
 public:
  constexpr OwnVariant(Tile tile, std::string_view kind = {}) : tile(tile) {
    number(tile.rows);
    add("x");
    number(tile.columns);
    if (tile.split > 1) add(" k"), number(tile.split);
    if (!kind.empty()) add(" "), add(kind);
  }
  constexpr std::string_view name() const { return {text_.data(), length_}; }

  Tile tile;

 private:
  constexpr void add(std::string_view word) {
    for (const char letter : word) text_[length_++] = letter;
  }
  constexpr void number(int value) {
    if (value >= 10) number(value / 10);
    text_[length_++] = static_cast<char>('0' + value % 10);
  }

  std::array<char, 32> text_{};
  size_t length_ = 0;
};

// The variants of a kernel by their shapes: kTileM, kTileN and kSplit are the tile, kKind the name's last word.
template <class... Shapes>
struct ShapeList {
  static constexpr int kCount = sizeof...(Shapes);
  static constexpr OwnVariant kVariants[] = {
      OwnVariant({Shapes::kTileM, Shapes::kTileN, Shapes::kSplit}, Shapes::kKind)...};

  // run(Shape()) with that variant's shape.
  template <class Run>
  static void with(int variant, const Run& run) {
    using Call = void (*)(const Run&);
    static constexpr Call kCalls[] = {[](const Run& run) { run(Shapes()); }...};
    kCalls[variant](run);
  }
};

// A kernel's best variant for a product, -1: none, and the microseconds that it is expected to take. beyond: the
// product has fewer rows than those that the kernel was measured with beside its rivals, which then come first.
struct OwnGuess {
  int variant = -1;
  double us = std::numeric_limits<double>::infinity();
  bool beyond = false;

  bool beats(const OwnGuess& other) const { return beyond != other.beyond ? other.beyond : us < other.us; }
};

// Variants are numbered by their index in `variants`, within one process only.
struct OwnKernel {
  std::string_view name;
  std::span<const OwnVariant> variants;
  Parts reads;  // of a product; the functions below get none with another part
  // Whether this GPU and this build compute the product, all of its epilogue included, with aligned operands.
  bool (*supports)(const Gpu& gpu, int variant, const Product& product);
  OwnGuess (*guess)(const Gpu& gpu, const Product& product);
  void (*run)(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data);

  bool can(const Gpu& gpu, int variant, const Product& product) const {
    return reads.has_all(parts_of(product)) && supports(gpu, variant, product);
  }
};

extern const OwnKernel wgmma_tile;        // Hopper, up to some thousand rows: a block for each tile
extern const OwnKernel wgmma_persistent;  // Hopper, many rows: blocks that stay and compute one tile after another
extern const OwnKernel wgmma_layernorm;   // the same with the residual LayerNorm behind the product: contained_norm.h
extern const OwnKernel wgmma_prenorm;     // the same with the residual sum and the norm before the next block
// Hopper, up to eight rows, whose time is that of reading the weight: a step of generation. By a weight in Q8_0 too,
// whose other operand becomes Q8_1 first. a and c lie apart; weight, bias and the norm's vectors are read before the
// kernel ahead has ended.
extern const OwnKernel few_rows;
extern const OwnKernel few_rows_lanes;  // the same on GPUs from 8.0 on that are no Hopper
inline constexpr int kMostFewRows = 8;  // the narrow side of a tensor core's tile
extern const OwnKernel wgmma_q8_0;      // Hopper, any number of rows by a weight in Q8_0
// Ampere and later, without warpgroup instructions: a block for each tile. In E4M3 from 8.9 on, in int8 on Hopper too.
extern const OwnKernel mma_tile;
std::span<const OwnKernel* const> own_kernels();

// A variant of a kernel of ours; without a kernel: none of them.
struct OwnChoice {
  const OwnKernel* kernel = nullptr;
  int variant = -1;

  explicit operator bool() const { return kernel != nullptr; }
  std::string_view variant_name() const { return kernel->variants[variant].name(); }
};
// By names, as tables have them; none where this build has no such kernel or variant.
OwnChoice find_own(std::string_view kernel, std::string_view variant);

// Error where the kernel does not support the product or an operand is not aligned.
void run_own(const Context<Cuda>& context, const OwnChoice& own, const Product& product, const ProductData& data);

// Which kernel runs a product where no table has a row for it, with operands aligned to 16 bytes. Without a kernel
// cuBLASLt's first proposal runs, and a norm after its product: on GPUs before 8.0, for float32, and where ours is not
// expected to be faster. Operands of 8 bits have no product then. With heads: which runs the product alone in less time
// than cuBLASLt's and `rotary` take.
OwnChoice guess_product(const Gpu& gpu, const Product& product);

// Whether products that defer norms by moments, those of one or more layers, take less than the same products alone and
// the norm kernels behind two of each layer, as guessed. On Hopper those of 16 bits do for as many tokens as norms are
// deferred of at most.
bool deferring_pays(const Gpu& gpu, std::span<const Product> layers);

// `own`, which runs a product alone, or another variant of its kernel that is hardly slower, where it does all of
// `product`; else none: what the product alone does not do is faster as a kernel.
OwnChoice with_ending(const Gpu& gpu, const OwnChoice& own, const Product& product);

// Names of the kernels that compute any product of a few sizes and types on this GPU, with commas.
std::string kernels_on(const Gpu& gpu);

// Whether one of our kernels computes the product.
bool has_kernel(const Gpu& gpu, const Product& product);
// In words, for errors: the product, and where none of our kernels computes it the member without which one would.
std::string in_the_way(const Gpu& gpu, const Product& product);

constexpr bool has_sums(const Product& p) { return p.m > 0 && p.n > 0 && p.k > 0; }

// 16-bit operands and result of one type: what most kernels ask for.
constexpr bool is_16_bit_linear(const Product& p) {
  return has_sums(p) && is_16_bit(p.a) && p.b->numbers == p.a && p.c == p.a;
}

// Operands in E4M3, a with a single scale, b with a single scale or a scale for each row; c of 16 bits, or E4M3 with a
// scale.
constexpr bool is_e4m3_linear(const Product& p) {
  return has_sums(p) && p.a == DType::e4m3 && p.b->numbers == DType::e4m3 && (is_16_bit(p.c) || p.c == DType::e4m3);
}

// a in byte rows, b in int8 with a scale for each row; c of 16 bits.
constexpr bool is_int8_linear(const Product& p) {
  return has_sums(p) && p.a == DType::uint8 && p.b == &formats::int8 && is_16_bit(p.c);
}

// dequantise_q8_0_cuda.cu. out [n, k] of fp16 or bf16, row-major. The weight is read before the kernel ahead has ended;
// a product that is launched behind this must not read `out` earlier (Context::overlap off).
void dequantise_q8_0(const Context<Cuda>& context, const Matrix& weight, DType dtype, void* out);

// b in Q8_0, all else of one 16-bit type.
constexpr bool is_q8_0_linear(const Product& p) {
  return has_sums(p) && is_16_bit(p.a) && p.b == &formats::q8_0 && p.c == p.a;
}

// The epilogues of kernels that are compiled for each: with a gate any activation, else none or erf GELU.
constexpr bool is_gelu_or_gate(const Epilogue& e) {
  return e.gate == Gate::pairs || e.activation == Activation::none || e.activation == Activation::gelu_erf;
}

}  // namespace ftbert
