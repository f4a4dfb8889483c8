// A norm over the rows of a matrix, as a value that layers hand down.
#pragma once
#include "core/types.h"

namespace ftbert {

enum class NormKind {
  none,   // rows stay as they are
  layer,  // (x - mean) / sqrt(variance + eps) * gamma + beta
  rms,    // x / sqrt(mean of squares + eps) * gamma
};

template <class T>
struct Norm {
  NormKind kind = NormKind::none;
  const T* gamma = nullptr;  // [cols]
  const T* beta = nullptr;   // [cols], or nullptr: 0
  float eps = 0;

  explicit operator bool() const { return kind != NormKind::none; }
};

}  // namespace ftbert
