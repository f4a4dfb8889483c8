// Norms as ops describe them.
#pragma once
#include <string>

#include "binding/op_checks.h"
#include "core/norm.h"

namespace ftbert::binding {

// The words of a norm's description (docs/checkpoint.md).
struct NormWords {
  NormKind kind;
  NormRounding rounding;
  double eps, offset;

  NormWords(const OptionalTensor& gamma, const OptionalTensor& beta, double eps, const std::string& kind, double offset,
            const std::string& rounding)
      : kind(!gamma            ? NormKind::none
             : kind == "layer" ? NormKind::layer
                               : NormKind::rms),
        rounding(rounding == "once" ? NormRounding::once : NormRounding::before_gamma),
        eps(eps),
        offset(offset) {
    FTBERT_CHECK(gamma || !beta, "gamma: expected with beta; neither means no norm");
    FTBERT_CHECK(kind == "layer" || kind == "rms", "kind: expected layer or rms, got ", kind);
    FTBERT_CHECK(rounding == "once" || rounding == "before_gamma", "rounding: expected once or before_gamma, got ",
                 rounding);
    FTBERT_CHECK(kind == "rms" || (offset == 0 && rounding == "once"),
                 "kind: expected rms beside an offset or before_gamma, got layer");
  }

  Norm<void> untyped(const OptionalTensor& gamma, const OptionalTensor& beta) const {
    const auto vector = [](const OptionalTensor& t) { return t ? t->const_data_ptr() : nullptr; };
    return {kind, vector(gamma), vector(beta), static_cast<float>(eps), static_cast<float>(offset), rounding};
  }
  template <class T>
  Norm<T> of(const OptionalTensor& gamma, const OptionalTensor& beta) const {
    return {kind, data<T>(gamma), data<T>(beta), static_cast<float>(eps), static_cast<float>(offset), rounding};
  }
};

}  // namespace ftbert::binding
