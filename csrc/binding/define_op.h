// How the ops come to be: a schema, a function, and words for tensors that no kernel can read.
#pragma once
#include <torch/library.h>

#include <vector>

namespace ftbert::binding {

// The op that the schema names.
void define_op(torch::Library& m, const char* schema, torch::CppFunction on_cpu, torch::CppFunction on_cuda,
               const std::vector<at::Tag>& tags);

// One function for both devices: the core's own switch chooses.
template <class F>
void define_op(torch::Library& m, const char* schema, F* function, const std::vector<at::Tag>& tags = {}) {
  define_op(m, schema, torch::CppFunction(function), torch::CppFunction(function), tags);
}

void refuse_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack*);

template <class F>
void define_cuda_op(torch::Library& m, const char* schema, F* function) {
  define_op(m, schema, torch::CppFunction::makeFromBoxedFunction<&refuse_on_cpu>(), torch::CppFunction(function), {});
}

}  // namespace ftbert::binding
