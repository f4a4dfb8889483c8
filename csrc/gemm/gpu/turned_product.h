// The product of queries, keys and values whose heads are normed and turned (kernels.h: rotary) before they are stored:
// endings of wgmma_tile, of 16-bit operands, and of wgmma_persistent, of E4M3 too. Hopper alone, 16-bit results.
// No CUDA header.
#pragma once
#include "gemm/gpu/own.h"
#include "kernels/kernels.h"

namespace ftbert {

// Whether a variant's warps have whole heads of this size, and its kernel knows these rules.
template <class T>
bool turns(const OwnChoice& own, const Heads& heads, const HeadRules<T>& rules);

// The variant that turns these heads, where the plans chose `own` for the product alone: that, or one of wgmma_tile
// that is hardly slower; none: a product and then `rotary` are faster, or the rules are not known here.
template <class T>
OwnChoice turning(const Gpu& gpu, const OwnChoice& own, const Product& product, const Heads& heads,
                  const HeadRules<T>& rules);

// data.c = the product with its bias, its first heads as `rotary` leaves them. Error where the variant does not turn
// them.
template <class T>
void run_turned(const Context<Cuda>& context, const OwnChoice& own, const Product& product, const ProductData& data,
                const Heads& heads, const HeadRules<T>& rules);

// Whether wgmma_persistent knows these rules: all numbers of a head in pairs half a head apart, and RMSNorm or no norm.
template <class T>
bool turns_in_registers(const Heads& heads, const HeadRules<T>& rules);

// run_turned with a variant of wgmma_persistent.
template <class T>
void run_turned_persistent(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data,
                           const Heads& heads, const HeadRules<T>& rules);

}  // namespace ftbert
