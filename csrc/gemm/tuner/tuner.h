// Choosing GEMM algorithms by measurement, and putting the choices in force. No CUDA header: gemm_tuner_cuda.cpp, or
// core/device_none.cpp in a build without CUDA.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/types.h"

namespace ftbert {

// One product of `linear`: row-major C [m, n] = epilogue(A [m, k] @ B [n, k]^T), FP32 accumulation.
struct GemmProblem {
  int64_t m = 0, n = 0, k = 0;
  DType dtype = DType::fp16;
  bool bias = false;
  Activation activation = Activation::none;  // where cuBLASLt has no exact epilogue for it, add_bias_act follows
  // C = LayerNorm(A @ B^T + bias + C) * gamma + beta: after the product comes add_bias_input_layernorm, if it does not
  // contain that.
  bool layernorm = false;
};

// How a product is computed: by cuBLASLt, where `data` is all of its description, means something to the same version
// of it only, and the rest is what it says of itself, for people; or by a product of gemm_fused.h, where id is -1 and
// `tile` the variant, or of gemm_layernorm.h, where id is -2.
struct GemmAlgorithm {
  std::array<uint64_t, 8> data{};
  int tile_rows = 0, tile_columns = 0;  // of C in a block; 0: not known
  int id = 0, tile = 0, stages = 0, split_k = 1, reduction = 0, swizzle = 0, custom = 0, inner_shape = 0, cluster = 0;
  bool folds = false;     // of gemm_few_cuda.cu: where all of a layer are, its LayerNorms may be folded into them
  int64_t workspace = 0;  // bytes
  float waves = 0;        // blocks / blocks that the GPU holds at once
};

// Products in a CUDA graph, ready to be timed, on the stream of the GemmTuner that recorded them, which must outlive
// it.
class GemmRecording {
 public:
  virtual ~GemmRecording() = default;

  // Replays it and returns the microseconds of one product. Recordings of a device, also of several problems, may take
  // turns: what disturbs the clocks then disturbs all alike.
  virtual double microseconds() = 0;
};

// Measures one problem on one device. Pointers are device memory of the caller, 256-byte aligned; calls are made on a
// stream of its own and return when the GPU is done. Throws Error.
class GemmTuner {
 public:
  virtual ~GemmTuner() = default;

  // What cuBLASLt proposes, its best guess first. At most `most`.
  virtual std::vector<GemmAlgorithm> heuristics(int most) = 0;

  // Every algorithm with every tile, stage count, split, cluster and swizzle that says it can do this problem.
  virtual std::vector<GemmAlgorithm> enumerate() = 0;

  // The products of gemm_fused.h that can do this problem, and with a LayerNorm those of gemm_layernorm.h.
  virtual std::vector<GemmAlgorithm> fused() = 0;

  // What `linear` runs for this problem.
  virtual GemmAlgorithm chosen() = 0;

  // That the memory at c must have: for [m, n], and behind it with a LayerNorm for what its kernels need.
  virtual int64_t c_bytes() const = 0;

  // Once, for its result. a [m, k], b [n, k], bias [n] or nullptr, c [m, n]; with a LayerNorm bias [3, n]: bias, gamma,
  // beta, and c is the residual too.
  virtual void run(const GemmAlgorithm& algorithm, const void* a, const void* b, const void* bias, void* c) = 0;

  // One product for each of `weights` matrices that lie one behind the other at b, so that a small B does not come out
  // of the L2 cache every time. A LayerNorm of some rows of c follows each product, as in a layer; what these take
  // alone is subtracted. nullptr for an algorithm that cannot run after all.
  virtual std::unique_ptr<GemmRecording> record(const GemmAlgorithm& algorithm, const void* a, const void* b,
                                                int64_t weights, const void* bias, void* c) = 0;
};

// workspace: device memory, gemm_workspace_bytes(device) of it; the caller keeps it alive.
std::unique_ptr<GemmTuner> make_gemm_tuner(int device, const GemmProblem& problem, void* workspace);

// A row of a tuned table: for m from `from` to `to`, both included.
struct TunedGemm {
  GemmProblem problem;  // m is not read
  int64_t from = 0, to = 0;
  std::array<uint64_t, 8> algorithm{};
};
// As a row's algorithm: cuBLASLt's; with a LayerNorm no product that contains it.
constexpr std::array<uint64_t, 8> kFirstProposal{};

// `data` of a variant of gemm_fused.h and of gemm_layernorm.h, and the variant of some data; -1: it is not of these.
std::array<uint64_t, 8> fused_algorithm(int variant);
int fused_variant(const std::array<uint64_t, 8>& data);
std::array<uint64_t, 8> norm_algorithm(int variant);
int norm_variant(const std::array<uint64_t, 8>& data);
// False for a product of our own that this build does not have; what cuBLASLt knows is not looked at.
bool is_known(const std::array<uint64_t, 8>& data);

// From now on `linear` on this device uses these rows; elsewhere, and where cuBLASLt refuses a row or this build lacks
// its product, guess_gemm or cuBLASLt's first proposal. Replaces an earlier table. The rows must come from
// gemm_library_version() and this kind of GPU.
void set_gemm_table(int device, const std::vector<TunedGemm>& rows);

}  // namespace ftbert
