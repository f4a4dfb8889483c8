// The CPU's kernels with vectors are compiled once for each instruction set, into one library; one set is chosen at
// load. A file of theirs puts all it defines, headers included, into the namespace FTBERT_ISA: a function that two sets
// shared by name would be linked once, with the instructions of either.
#pragma once
#include <string_view>

#include "kernels/kernels.h"

// X(name) for each kernel of which every set has one, declared as in kernels.h.
#define FTBERT_ISA_KERNELS(X) \
  X(add_bias_act)             \
  X(add_bias_gate)            \
  X(add_bias_input_layernorm) \
  X(add_qkv_bias)             \
  X(argmax)                   \
  X(attention_scratch_bytes)  \
  X(embeddings_layernorm)     \
  X(pooling)                  \
  X(quantise)                 \
  X(rotary)

namespace ftbert {

// out [m, n] = act(a [m, k] @ weight [n, k]^T + bias), the weight packed by pack_panels.
struct PanelProduct {
  int64_t m, n, k;
  const float *a, *panels, *bias;  // bias [n] or nullptr
  Activation activation;
  float* out;
  float* gated = nullptr;  // [m, n / 2], what a gate makes of the sums, which then lie at out: Gate::pairs
};

// out [m, n] = act((a @ weight^T) * scales + bias): `a` in uint8 with a scale and a zero point for each row, the weight
// in int8, packed by pack_int8. Sums are exact: k is at most kMostInt8Depth.
struct Int8Product {
  int64_t m, n, k;
  const uint8_t* a;  // [m] rows of k bytes: core/format.h; row 0 begins a cache line
  const void* panels;
  const float *scales, *bias;  // [n], of the weight's rows; bias or nullptr
  Activation activation;
  float* out;                     // or nullptr, where one of these gets the results
  float* gated = nullptr;         // [m, n / 2], what a gate makes of the sums: Gate::pairs
  bfloat16_t* rounded = nullptr;  // [m, n]
};

// out [m, n] = act(a @ weight^T + bias), the weight in q8_0, packed by pack_q8_0 (gemm/cpu/q8_0_panels.h). Rows of `a`
// are stored as Q8_1 first: int8 with a scale for each 32 neighbours (kernels/elementwise/q8_1_row.h). Sums of a block
// are exact, and added up in float in one order, so that all instruction sets, and all m, make the same of a row.
struct Q8Product {
  int64_t m, n, k;
  const float* a;
  const void* panels;
  const float* bias;  // [n] or nullptr
  Activation activation;
  float* out;              // or nullptr, where `gated` gets the results
  float* gated = nullptr;  // [m, n / 2], what a gate makes of the sums: Gate::pairs
};

// What the kernels of attention read of a policy.
using AttentionScores = ScoresRead<float, kCpuAttentionReads>;
using SoftmaxScores = ScoresRead<float, kSoftmaxReads>;

// One set. isa_table_cpu.cpp fills it.
struct IsaKernels {
#define FTBERT_MEMBER(name) decltype(&ftbert::name<Cpu, float>) name;
  FTBERT_ISA_KERNELS(FTBERT_MEMBER)
#undef FTBERT_MEMBER
  Operand (*attention)(const Heads& heads, const QueriesKeysValues& from, const Sequences& sequences,
                       const AttentionScores& scores, const AttentionScratch& scratch, const Operand& to);
  void (*softmax)(const Heads& heads, const float* scores, const Sequences& sequences, const SoftmaxScores& policy,
                  float* probabilities);
  int64_t panel_width;
  void (*pack_panels)(const float* weight, int64_t n, int64_t k,
                      float* panels);  // [n up to whole panels, k]: panels of [k, panel_width]
  void (*panel_product)(const PanelProduct& product);
  void (*q8_0_product)(const Q8Product& product);
  void (*quantise_q8_1)(const float* x, int64_t rows, int64_t cols, int8_t* numbers, float* scales);
  bool bf16;           // has instructions for products of bf16 pairs
  bool tiles = false;  // multiplies by AMX
  // The instructions of int8 products: avx_vnni, avx512_vnni or amx_int8; nullptr, as all that follows, where there are
  // none. The panels are the same for all.
  const char* int8 = nullptr;
  int64_t (*int8_panel_bytes)(int64_t n, int64_t k) = nullptr;
  void (*pack_int8)(const int8_t* weight, int64_t n, int64_t k, void* panels) = nullptr;
  void (*unpack_int8)(const void* panels, int64_t n, int64_t k, int8_t* weight) = nullptr;
  void (*int8_product)(const Int8Product& product) = nullptr;
};

// The set for this CPU, or the highest one up to that which FTBERT_MAX_CPU_ISA names: avx2, avx2_vnni, avx512,
// avx512_vnni, avx512_bf16 or amx. Throws where this CPU has none of them.
const IsaKernels& isa_kernels();

// Its name.
std::string_view cpu_isa();

}  // namespace ftbert
