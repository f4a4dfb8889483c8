// LayerNorm and RMSNorm of training over the rows of [rows, cols], and their gradients: CUDA alone. On the CPU PyTorch
// composes them (ftbert/norm/composition.py).
#pragma once
#include "core/context.h"
#include "core/norm.h"
#include "core/operand.h"

namespace ftbert {

// Matrices are [rows, cols] and vectors [cols], of fp32, fp16 or bf16 each for itself; an operand without data is
// absent. Sums are float. Rows are fast where all matrices have one type and start on 16-byte boundaries.
struct TrainingNorm {
  NormKind kind;  // layer or rms
  int64_t rows, cols;
  float eps, offset;    // offset: added to gamma
  Operand gamma, beta;  // absent: 1, without the offset, and 0. beta: of kind layer
};

struct NormForward : TrainingNorm {
  Operand x, residual;
  Operand sum;  // x + residual, where there is a residual: what is stored is what is normalised
  Operand out;
  float *mean, *rstd;  // [rows]; mean: of kind layer
};
void norm_forward(Context<Cuda>& context, const NormForward& norm);

// With x^ the normalised row and a = grad * gamma:
//   grad_x = rstd * (a - mean(a) - x^ * mean(a * x^)) + grad_sum     (rms: without mean(a))
//   grad_gamma = the sum of grad * x^ over rows, grad_beta = the sum of grad
// Every sum is made in the same order in each run.
struct NormBackward : TrainingNorm {
  Operand grad;      // of out
  Operand grad_sum;  // of the sum; may be absent
  Operand saved;     // what was normalised, or with from_output the norm's result: x^ = (saved - beta) / gamma, where a
  bool from_output;  // gamma nearer to 0 than eps counts as eps or -eps
  const float *mean, *rstd;  // [rows]; mean: of kind layer, and not read with from_output
  Operand grad_x;
  Operand grad_gamma, grad_beta;  // may be absent
  float* partials;                // [2, norm_partials(context, rows), cols], where one of them is there
};
void norm_backward(Context<Cuda>& context, const NormBackward& norm);

// How many sums over a part of the rows norm_backward makes of a column, before it sums them.
int64_t norm_partials(const Context<Cuda>& context, int64_t rows);

}  // namespace ftbert
