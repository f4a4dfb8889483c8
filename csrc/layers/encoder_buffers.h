// What a forward pass works on, for encoder.cpp and encoder_buffers.cpp.
#pragma once
#include <cstdint>
#include <type_traits>
#include <vector>

#include "encoder.h"
#include "gemm/gemm.h"

namespace ftbert {

template <class Device>
inline constexpr bool on_cpu = std::is_same_v<Device, Cpu>;

// Whether FoldedLayers exists for this pair at all.
template <class Device, class T>
inline constexpr bool may_fold = !on_cpu<Device> && !std::is_same_v<T, float>;

// What a pass through a layer works on.
template <class Device, class T>
struct Encoder<Device, T>::Scratch {
  T* qkv;        // [rows, 3*hidden]
  T* context;    // [rows, hidden], attention's result
  T* projected;  // [rows, hidden], a block's result before the residual
  T* inner;      // [rows, inter]; shares memory with qkv (on a GPU with context too), dead by then
  NormMoments norm_moments;
  void* attention_scratch;
  T *q, *k, *v;      // general path: [sequences, heads, seq, head_size]
  float* scores;     // general path: [sequences, heads, seq, seq]
  T* probabilities;  // general path, T != float
  int64_t general_sequences;
};

template <class Device, class T>
struct Encoder<Device, T>::Buffers : Scratch {
  int32_t* positions;  // [tokens], where the input does not bring them
  int32_t* columns;    // [tokens], columns in the padded input, where attention has a relative bias and ids are padded
  T* hidden;           // [tokens, hidden], where the caller reads first rows only
  T* first;            // [batch, hidden], attention's result in those rows
  T* embedded;         // [tokens, embedding], where it is projected to hidden
  T* normed;           // [tokens, hidden], pre-LayerNorm models: what the next block reads; `hidden` keeps the sum
  long long* folded_moments;  // where LayerNorms may be folded
  // Where threads have sequences of their own, from cuts[i] to before cuts[i + 1]. Its memory is this one's scratch,
  // too.
  std::vector<Scratch> shares;
  std::vector<int64_t> cuts;
};

}  // namespace ftbert
