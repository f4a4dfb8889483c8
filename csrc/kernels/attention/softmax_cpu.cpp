// softmax(scale * score, capped, + relative bias) over the keys that each row's query sees; 0 at the others.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/attention/relative_bias_row.h"
#include "kernels/attention/softmax_row.h"
#include "kernels/isa.h"

namespace ftbert::FTBERT_ISA {

void softmax(const Heads& heads, const float* scores, const Sequences& sequences, const SoftmaxScores& policy,
             float* probabilities) {
  const RelativeBias<float>& relative = policy.get<ScoreMember::bias>();
  const Window& window = policy.get<ScoreMember::window>();
  const float soft_cap = policy.get<ScoreMember::soft_cap>().value;
  const int64_t seq = sequences.max_k;
  const float scale = heads.scale;
#pragma omp parallel for schedule(static) collapse(2)
  for (int64_t b = 0; b < sequences.count; ++b) {
    for (int64_t h = 0; h < heads.count; ++h) {
      const int64_t queries = sequences.cu_q[b + 1] - sequences.cu_q[b];
      const int64_t keys = sequences.end_of_keys()[b] - sequences.cu_k[b];
      const int32_t* column = relative.columns ? relative.columns + sequences.cu_q[b] : nullptr;
      for (int64_t s = 0; s < seq; ++s) {
        const int64_t offset = ((b * heads.count + h) * seq + s) * seq;
        const float* in = scores + offset;
        float* out = probabilities + offset;
        if (s >= queries) {
          std::memset(out, 0, seq * sizeof(float));
          continue;
        }
#pragma omp simd
        for (int64_t j = 0; j < keys; ++j) out[j] = in[j] * scale;
        if (soft_cap > 0)
          for (int64_t j = 0; j < keys; ++j) out[j] = soft_cap * std::tanh(out[j] / soft_cap);
        if (relative.table) {
          const float* bias = relative.table + h * (2 * relative.span - 1) + relative.span - 1;
          add_relative_bias(bias, relative.span - 1, column, s, keys, out);
        }
        const int64_t begin = std::min<int64_t>(window.begin(static_cast<int>(s)), keys);
        const int64_t end = std::max<int64_t>(begin, window.end(static_cast<int>(s), static_cast<int>(keys)));
        std::memset(out, 0, begin * sizeof(float));
        const float inverse = begin < end ? 1.0f / exp_row(out + begin, end - begin) : 0.0f;
#pragma omp simd
        for (int64_t j = begin; j < end; ++j) out[j] *= inverse;
        std::memset(out + end, 0, (seq - end) * sizeof(float));
      }
    }
  }
}

}  // namespace ftbert::FTBERT_ISA
