// The CPU's kernels with vectors are compiled once for each instruction set, into one library; one set is chosen at
// load. A file of theirs puts all it defines, headers included, into the namespace FTBERT_ISA: a function that two sets
// shared by name would be linked once, with the instructions of either.
#pragma once
#include <string>
#include <string_view>

#include "kernels/kernels.h"

// X(name) for each kernel of which every set has one, declared as in kernels.h.
#define FTBERT_ISA_KERNELS(X) \
  X(add_bias_act)             \
  X(add_bias_gate)            \
  X(add_bias_input_layernorm) \
  X(add_position_products)    \
  X(add_qkv_bias)             \
  X(argmax)                   \
  X(attention_scratch_bytes)  \
  X(embeddings_layernorm)     \
  X(pooling)                  \
  X(quantise)                 \
  X(rotary)

namespace ftbert {

struct Product;  // gemm/product.h
struct CpuData;  // gemm/cpu/kernel.h

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
  void (*max_sim)(const MaxSim& of, void* scratch, float* scores);
  size_t (*max_sim_scratch_bytes)(const MaxSim& of);
  // Products by weights in panels: gemm/cpu/
  void (*panel_product)(const Product& product, const CpuData& data);
  void (*q8_0_product)(const Product& product, const CpuData& data);
  void (*int8_product)(const Product& product, const CpuData& data) = nullptr;
  int64_t panel_width;  // of panel_product
  bool bf16;            // has instructions for products of bf16 pairs
  bool tiles = false;   // multiplies by AMX
  // The instructions of int8_product: avx2, avx_vnni, avx512_vnni or amx_int8; nullptr, as that is, without any.
  const char* int8 = nullptr;
};

// The set for this CPU, or the highest one up to that which FTBERT_MAX_CPU_ISA names: avx2, avx2_vnni, avx512,
// avx512_vnni, avx512_bf16 or amx. Throws where this CPU has none of those of this build.
const IsaKernels& isa_kernels();

// Its name.
std::string_view cpu_isa();

// Why there is none for this CPU, whatever the build has, or "". Where there is one and this build is without it, or
// FTBERT_MAX_CPU_ISA names none, it throws as isa_kernels does.
std::string why_no_cpu_kernels();

// The names of all that this build has, whatever this CPU has: "avx2, avx512". A checkout compiles one set until
// FTBERT_CPU_ISAS asks for others.
std::string cpu_isas();

}  // namespace ftbert
