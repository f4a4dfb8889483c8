// Heads that are turned by their token's position: tables of angles, and the kernel. kernels.h, which includes this,
// says what its words mean.
#pragma once
#include <cstdint>

#include "core/context.h"
#include "core/norm.h"
#include "core/operand.h"
#include "kernels/attention/attention_input.h"

namespace ftbert {

// How heads are turned: the first `dims` numbers of each in pairs, (i, i + dims/2) or interleaved (2i, 2i + 1), pair i
// of a token at position p by the angle whose cosine and sine are table[p][i].
struct Rotation {
  const float* table = nullptr;  // [positions, dims/2, 2], or nullptr: heads stay as they are
  int64_t positions = 0, dims = 0;
  bool interleaved = false;

  explicit operator bool() const { return table != nullptr; }
};

// The table, amplitude * cosine and sine of position * frequencies[i]; angles are computed in double. frequencies
// [pairs] is memory of the host.
template <class Device>
void rotary_table(Context<Device>& context, const double* frequencies, int64_t pairs, double amplitude,
                  int64_t positions,
                  float* table);  // [positions, pairs, 2]

// Frequencies that fall where a sequence has n > `trained` tokens: pair i of p then turns by its frequency times
// g^(-i / (p - 1)), g = factor * n / trained - factor + 1. So it does where theta grows by g^(p / (p - 1)), which is
// transformers' rope_type "dynamic" and nomic's rotary_scaling_factor for a sequence alone.
struct Stretch {
  double factor = 1;
  int64_t trained = 1;
  bool operator==(const Stretch&) const = default;
};

// A table of a batch's own, as rotary_table makes it, with a row for each token, by the length of its sequence; and
// the tokens' rows in it, 0, 1, 2, ... positions int32 [tokens]; cu_seqlens int32 [count + 1], of which the CPU's are
// readable by the host. Rows past cu_seqlens[count] are 0. Angles are computed in double. frequencies [pairs], pairs
// at least 2, is memory of the host.
template <class Device>
void rotary_angles(Context<Device>& context, const double* frequencies, int64_t pairs, double amplitude,
                   const Stretch& stretch, const int32_t* positions, const int32_t* cu_seqlens, int64_t count,
                   int64_t tokens, float* table,
                   int32_t* rows);  // [tokens, pairs, 2], [tokens]

// What becomes of heads of queries and keys between their product and attention: a norm, then a rotation.
template <class T>
struct HeadRules {
  Norm<T> q_norm, k_norm;  // [head_size]
  Rotation rotation;
  // [rows], with a table; there before the kernel ahead began, of `rotary` or of the product that contains it
  const int32_t* positions = nullptr;

  explicit operator bool() const { return q_norm || k_norm || rotation; }
};

// Where keys and values of a call's tokens go in a cache of them; those whose row is not in it go nowhere.
template <class T>
struct CacheRows {
  const int32_t* rows = nullptr;  // [tokens], or nullptr: there is no cache
  int64_t count = 0;              // of the cache's rows
  T* keys = nullptr;              // [count, kv_width]
  T* values = nullptr;            // [count, kv_width]

  explicit operator bool() const { return rows != nullptr; }
};

// In place over the heads of queries and keys in qkv [rows, qkv_width], computed in float; or those of keys, and values
// as they are, go to `cache` alone. T is the type of the norms' weights; on the CPU qkv may be bf16. A position outside
// the table gives heads of NaN on CUDA, where no host may be asked; the CPU's caller has checked them.
template <class Device, class T>
void rotary(Context<Device>& context, const Heads& heads, const HeadRules<T>& rules, int64_t rows, const Operand& qkv,
            const CacheRows<T>& cache = {});

}  // namespace ftbert
