// The registry of the CPU's kernels for products by a weight. No header of a library.
#pragma once
#include <cstdint>
#include <span>
#include <string_view>

#include "core/context.h"
#include "gemm/product.h"

namespace ftbert {

// Where a product's operands lie; shapes as in Product.
struct CpuData {
  Operand a;
  const void* b = nullptr;         // in the kernel's layout
  const float* b_scale = nullptr;  // [n], where each row of b has a scale in memory of its own
  const float* bias = nullptr;     // [n], or nullptr where the epilogue has none
  void* c = nullptr;
  float* sums = nullptr;      // [m, n], memory for the sums that a gate reads
  bool in_one_piece = false;  // the result may not be opaque
};

// The layout of a weight [n, k] that a kernel reads, one piece of memory. numbers [n, k] and scales [n, k / block] are
// of the weight's format; scales count where they lie among its numbers.
struct WeightLayout {
  int64_t (*bytes)(int64_t n, int64_t k);
  void (*pack)(const void* numbers, const half_t* scales, int64_t n, int64_t k, void* packed);
  void (*unpack)(const void* packed, int64_t n, int64_t k, void* numbers, half_t* scales);
};

struct CpuKernel {
  std::string_view name;
  Parts reads;  // of a product; the functions below get none with another part
  // Whether it computes the product, all of its epilogue included.
  bool (*supports)(const Product& product);
  // Where the result is: data.c, or memory of a library, valid until the next product into the same data.c or the end
  // of the call. m may be 0.
  Operand (*run)(Context<Cpu>& context, const Product& product, const CpuData& data);
  const WeightLayout* layout = nullptr;  // nullptr: rows [n, k], or what the library of this kernel packs
  // What it needs of the CPU or of the build and is not there, in words, or nullptr; the same in all of a process.
  // Without this function it needs nothing.
  const char* (*lacks)() = nullptr;

  bool can(const Product& product) const { return reads.has_all(parts_of(product)) && supports(product); }
};

// Ours, by a weight in panels.
extern const CpuKernel float_panels;
// Of byte rows by int8 with a scale for each row. Sums are exact.
extern const CpuKernel int8_panels;
// Of floats, stored as Q8_1 first (kernels/elementwise/q8_1_row.h). Sums of a block are exact, and added up in float in
// one order, so that all instruction sets, and all m, make the same of a row.
extern const CpuKernel q8_0_panels;
extern const CpuKernel cblas_kernel;  // cblas.cpp, of the standalone core: plain rows in float

// A library's kernels come first, then ours: the first that lacks nothing and supports a product computes it.
std::span<const CpuKernel* const> cpu_kernels();
struct LibraryKernel {  // as a global object
  explicit LibraryKernel(const CpuKernel& kernel);
};

// That for weights of this format, whose layout they are to have; nullptr: none.
const CpuKernel* kernel_for(const Format& weight);
// What the first kernel for such weights lacks, in words; nullptr: there is one that lacks nothing, or none at all.
const char* lacking_for(const Format& weight);

// `linear` on the CPU: the weight's kernel, then the part of the epilogue that the kernel does not support.
// in_one_piece: as in CpuData.
Operand run_kernel(Context<Cpu>& context, const Linear<float>& linear, const Operand& a, int64_t m, Epilogue epilogue,
                   const Operand& out, bool in_one_piece);

}  // namespace ftbert
