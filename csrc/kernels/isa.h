// The CPU's kernels with vectors are compiled once for each instruction set, into one library; one set is chosen at
// load. A file of theirs puts all it defines, headers included, into the namespace FTBERT_ISA: a function that two sets
// shared by name would be linked once, with the instructions of either.
#pragma once
#include <string_view>

#include "kernels/kernels.h"

// X(name) for each kernel of which every set has one.
#define FTBERT_ISA_KERNELS(X) \
  X(add_bias_act)             \
  X(add_bias_gate)            \
  X(add_bias_input_layernorm) \
  X(add_qkv_bias)             \
  X(attention)                \
  X(attention_scratch_bytes)  \
  X(embeddings_layernorm)     \
  X(pooling)                  \
  X(quantise)                 \
  X(rotary)                   \
  X(softmax)

namespace ftbert {

// out [m, n] = act(a [m, k] @ weight [n, k]^T + bias), the weight packed by pack_panels.
struct PanelProduct {
  int64_t m, n, k;
  const float *a, *panels, *bias;  // bias [n] or nullptr
  Activation activation;
  float* out;
  float* gated = nullptr;  // [m, n / 2], what a gate makes of the sums, which then lie at out: Gate::pairs
};

// One set. isa_table_cpu.cpp fills it.
struct IsaKernels {
#define FTBERT_MEMBER(name) decltype(&ftbert::name<Cpu, float>) name;
  FTBERT_ISA_KERNELS(FTBERT_MEMBER)
#undef FTBERT_MEMBER
  int64_t panel_width;
  void (*pack_panels)(const float* weight, int64_t n, int64_t k,
                      float* panels);  // [n up to whole panels, k]: panels of [k, panel_width]
  void (*panel_product)(const PanelProduct& product);
  bool bf16;   // has instructions for products of bf16 pairs
  bool tiles;  // was compiled with AMX
};

// The set for this CPU, or for the lower one that FTBERT_MAX_CPU_ISA names: avx2, avx512, avx512_bf16 or amx. Throws
// where this CPU has none of them.
const IsaKernels& isa_kernels();

// Its name; amx: the set avx512_bf16, with tiles.
std::string_view cpu_isa();

}  // namespace ftbert
