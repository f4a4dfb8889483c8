// Heads of queries and keys as ops describe them.
#pragma once
#include <string>

#include "kernels/kernels.h"
#include "norm_words.h"
#include "test_checks.h"

namespace ftbert::binding {

// A rotation where there is a table [positions, dims/2, 2], norms where there are gammas.
struct HeadWords {
  const OptionalTensor &positions, &q_gamma, &q_beta, &k_gamma, &k_beta;
  NormWords q, k;
  Rotation rotation;

  // qkv: what is turned; stream: of the type of the norms' weights.
  HeadWords(const Tensor& qkv, const Tensor& stream, const Heads& heads, const OptionalTensor& positions,
            const OptionalTensor& table, bool interleaved, const std::string& kind, const OptionalTensor& q_gamma,
            const OptionalTensor& q_beta, const OptionalTensor& k_gamma, const OptionalTensor& k_beta, double eps,
            double offset, const std::string& rounding)
      : positions(positions),
        q_gamma(q_gamma),
        q_beta(q_beta),
        k_gamma(k_gamma),
        k_beta(k_beta),
        q(q_gamma, q_beta, eps, kind, offset, rounding),
        k(k_gamma, k_beta, eps, kind, offset, rounding) {
    FTBERT_CHECK(q_gamma.has_value() == k_gamma.has_value(),
                 "q_gamma, k_gamma: expected both with a norm, and none "
                 "without one");
    for (const auto& [name, weight] : {std::pair("q_gamma", &q_gamma), std::pair("q_beta", &q_beta),
                                       std::pair("k_gamma", &k_gamma), std::pair("k_beta", &k_beta)})
      same(name, *weight, stream, {heads.size});
    if (!table) return;
    rank("table", *table, 3);
    FTBERT_CHECK(table->scalar_type() == at::kFloat && table->device() == qkv.device() && table->size(0) > 0 &&
                     table->size(1) > 0 && 2 * table->size(1) <= heads.size && table->size(2) == 2 &&
                     reinterpret_cast<uintptr_t>(table->const_data_ptr()) % 16 == 0,
                 "table: expected Float [positions, up to head_size/2, 2] on ", qkv.device().str(),
                 " that begins at 16 bytes, got ", describe(*table), " for head_size ", heads.size);
    FTBERT_CHECK(positions, "positions: expected with a table");
    integers("positions", *positions, qkv, at::kInt, qkv.size(0));
    check_range("positions", *positions, qkv.size(0), 0, table->size(0));
    rotation = {data<float>(*table), table->size(0), 2 * table->size(1), interleaved};
  }

  template <class T>
  HeadRules<T> rules() const {
    return {q.of<T>(q_gamma, q_beta), k.of<T>(k_gamma, k_beta), rotation, data<int32_t>(positions)};
  }
};

}  // namespace ftbert::binding
