// What a call carries down to kernels and products: the stream, or the CPU's products; never global state.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/gpu.h"
#include "core/types.h"

namespace ftbert {

struct CpuProducts;   // gemm/gemm.h
struct ProductPlans;  // gemm/plans.h
template <class Device>
class Communicator;  // core/communicator.h

template <class Device>
struct Context;

template <>
struct Context<Cpu> {
  CpuProducts* products = nullptr;            // outlives the call
  Communicator<Cpu>* communicator = nullptr;  // of a model of several ranks
};

template <>
struct Context<Cuda> : Gpu {
  void* stream = nullptr;  // cudaStream_t of the caller
  int device = 0;
  ProductPlans* plans = nullptr;   // of this device's products; shared by threads, internally locked
  bool tf32 = false;               // asks for fp32 products with operands rounded to 10 bits (TF32)
  void* gemm_workspace = nullptr;  // one call's own
  size_t gemm_workspace_bytes = 0;
  void* weight_scratch = nullptr;  // one call's own: a weight in Q8_0 made 16-bit, for products of many rows
  size_t weight_scratch_bytes = 0;
  bool overlap = true;                         // kernels may start while the one ahead of them ends (device/launch.cuh)
  Communicator<Cuda>* communicator = nullptr;  // of a model of several ranks
};

}  // namespace ftbert
