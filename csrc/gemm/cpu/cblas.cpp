// Matrix products of the standalone build: the CBLAS found at build time, or a plain loop where there is none.
#include <algorithm>

#include "gemm/cpu/kernel.h"
#include "gemm/gemm.h"

#ifdef FTBERT_CBLAS
extern "C" void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a,
                            int lda, const float* b, int ldb, float beta, float* c, int ldc);
#endif

namespace ftbert {
namespace {

// c [m, n] = a [m, k] @ b, b [n, k] transposed or [k, n]
void sgemm(int64_t m, int64_t n, int64_t k, bool b_transposed, const float* a, const float* b, float* c) {
#ifdef FTBERT_CBLAS
  constexpr int kRowMajor = 101, kNoTrans = 111, kTrans = 112;  // cblas.h's CBLAS_ORDER and CBLAS_TRANSPOSE
  cblas_sgemm(kRowMajor, kNoTrans, b_transposed ? kTrans : kNoTrans, static_cast<int>(m), static_cast<int>(n),
              static_cast<int>(k), 1.0f, a, static_cast<int>(k), b, static_cast<int>(b_transposed ? k : n), 0.0f, c,
              static_cast<int>(n));
#else
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < m; ++i) {
    float* row = c + i * n;
    if (b_transposed) {
      for (int64_t j = 0; j < n; ++j) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t p = 0; p < k; ++p) sum += a[i * k + p] * b[j * k + p];
        row[j] = sum;
      }
    } else {
      std::fill(row, row + n, 0.0f);
      for (int64_t p = 0; p < k; ++p) {
        const float x = a[i * k + p];
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) row[j] += x * b[p * n + j];
      }
    }
  }
#endif
}

bool supports(const Product& p) { return float_panels.supports(p); }

Operand run(Context<Cpu>&, const Product& p, const CpuData& data) {
  auto* const c = static_cast<float*>(data.c);
  sgemm(p.m, p.n, p.k, true, data.a.as<float>(), static_cast<const float*>(data.b), c);
  return Operand::of(c);
}

class CblasProducts : public CpuProducts {
 public:
  void gemm(const Product& p, const float* a, const float* b, float* c) override {
    for (int64_t i = 0; i < p.batch; ++i)
      sgemm(p.m, p.n, p.k, p.b_transposed, a + i * p.m * p.k, b + i * p.n * p.k, c + i * p.m * p.n);
  }
};

}  // namespace

const CpuKernel cblas_kernel{"CBLAS", Parts(), supports, run};
const LibraryKernel registered(cblas_kernel);

CpuProducts& cblas_products() {
  static CblasProducts instance;
  return instance;
}

std::string cblas_name() {
#ifdef FTBERT_CBLAS
  return FTBERT_CBLAS;
#else
  return "plain loops (no CBLAS was found at build time: slow)";
#endif
}

}  // namespace ftbert
