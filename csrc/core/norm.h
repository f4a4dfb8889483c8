// A norm over the rows of a matrix, as a value that layers hand down.
#pragma once
#include "core/types.h"

namespace ftbert {

enum class NormKind {
  none,   // rows stay as they are
  layer,  // (x - mean) / sqrt(variance + eps) * gamma + beta
  rms,    // x / sqrt(mean of squares + eps) * (gamma + offset) + beta
};

enum class NormRounding {  // to the stream's type
  once,                    // of the result
  before_gamma,            // of the normalised row too, which gamma then multiplies (Llama)
};

template <class T>
struct Norm {
  NormKind kind = NormKind::none;
  const T* gamma = nullptr;  // [cols]
  const T* beta = nullptr;   // [cols], or nullptr: 0
  float eps = 0;
  float offset = 0;                            // of kind rms: added to gamma (Gemma: 1)
  NormRounding rounding = NormRounding::once;  // before_gamma: of kind rms

  explicit operator bool() const { return kind != NormKind::none; }
  // What products with a norm inside know.
  bool is_layernorm_with_beta() const { return kind == NormKind::layer && gamma && beta && offset == 0; }
};

}  // namespace ftbert
