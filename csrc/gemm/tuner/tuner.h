// Measuring the kernels and algorithms of a product. No CUDA header: tuner_cuda.cpp, or gemm_none.cpp in a build
// without CUDA.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "gemm/gpu/own.h"
#include "gemm/product.h"

namespace ftbert {

// How a product is computed: by a kernel of ours; or by cuBLASLt, where `data` is all of its description and means
// something to the same version of it only.
struct Algorithm {
  OwnChoice own = {};
  Tile tile = {};  // of ours
  std::array<uint64_t, 8> data{};
  int id = 0;  // of cuBLASLt's kernel, by its own count
};

// Products in a CUDA graph, ready to be timed, on the stream of the Tuner that recorded them, which must outlive it.
class Recording {
 public:
  virtual ~Recording() = default;

  // Replays it and returns the microseconds of one product. Recordings of a device, also of several products, may take
  // turns: what disturbs the clocks then disturbs all alike.
  virtual double microseconds() = 0;
};

// Measures one product on one device. Pointers are device memory of the caller, 256-byte aligned, a with room for
// rows_in_tiles(m) rows; calls are made on a stream of its own and return when the GPU is done. Throws Error.
class Tuner {
 public:
  virtual ~Tuner() = default;

  // What cuBLASLt proposes, its best guess first. At most `most`.
  virtual std::vector<Algorithm> heuristics(int most) = 0;

  // Our kernels that can do this product; with a norm those that contain it and those that it follows.
  virtual std::vector<Algorithm> own() = 0;

  // What `linear` runs for this product.
  virtual Algorithm chosen() = 0;

  // That the memory at c must have: for c, and behind it with a norm, a gate or 8 bits for what its kernels need.
  virtual int64_t c_bytes() const = 0;

  // Once, for its result. a [m, k], b [n, k], bias [n] or nullptr, c [m, n] or with a gate [m, n / 2]. With a norm bias
  // is [3, n]: bias, gamma, beta, and c is the residual too; with After::norm_beside the norm of c lies behind it, at
  // the next multiple of 256 bytes.
  virtual void run(const Algorithm& algorithm, const void* a, const void* b, const void* bias, void* c) = 0;

  // One product for each of `weights` matrices that lie one behind the other at b, so that a small B does not come out
  // of the L2 cache every time. A LayerNorm of some rows of c follows each product, as in a layer; what these take
  // alone is subtracted. nullptr for an algorithm that cannot run after all.
  virtual std::unique_ptr<Recording> record(const Algorithm& algorithm, const void* a, const void* b, int64_t weights,
                                            const void* bias, void* c) = 0;
};

// product: a linear layer's, in types that a kernel computes. An activation that cuBLASLt cannot apply exactly is
// followed by add_bias_act, a gate by add_bias_gate, a norm that the kernel does not contain by
// add_bias_input_layernorm. Device memory that the caller keeps alive: workspace, gemm_workspace_bytes(device) of it,
// and the scales of a product that has any, n ones. The bias of a result in E4M3 is fp16. cuBLASLt's algorithms for
// E4M3 are there to compare with: `linear` runs none.
std::unique_ptr<Tuner> make_tuner(int device, const Product& product, void* workspace, const float* ones);

}  // namespace ftbert
