// The CPU's products by oneDNN, an entry of the registry: weights lie in a tensor of its own layout.
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "binding/torch_products.h"
#include "core/check.h"
#include "gemm/cpu/kernel.h"
#include "kernels/isa.h"
#include "kernels/kernels.h"

namespace ftbert::binding {
namespace {

using Scalars = c10::List<std::optional<at::Scalar>>;
using LinearPointwise = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                                   std::string_view, Scalars, std::optional<std::string_view>);
using Reorder = at::Tensor(const at::Tensor&, std::optional<int64_t>);

// The operators exist only where PyTorch was built with oneDNN; looked up once.
template <class Signature>
std::optional<c10::TypedOperatorHandle<Signature>> find(const char* name) {
  const auto handle = c10::Dispatcher::singleton().findSchema({name, ""});
  if (!handle || !handle->hasKernelForDispatchKey(c10::DispatchKey::CPU)) return std::nullopt;
  return handle->typed<Signature>();
}

const auto& linear_pointwise() {
  static const auto op = find<LinearPointwise>("mkldnn::_linear_pointwise");
  return op;
}

const auto& reorder_weight() {
  static const auto op = find<Reorder>("mkldnn::_reorder_linear_weight");
  return op;
}

// Rows [first, first + rows) of a [m, k], rounded where they are float.
at::Tensor rows_in_bf16(const Operand& a, int64_t first, int64_t rows, int64_t k) {
  if (a.dtype() != DType::bf16) return float_view(a.as<float>() + first * k, {rows, k}).to(at::kBFloat16);
  return at::from_blob(a.as<bfloat16_t>() + first * k, {rows, k}, at::TensorOptions().dtype(at::kBFloat16));
}

struct OneDnnActivation {
  const char* name;
  const char* algorithm;
};

// The activations that a product of oneDNN applies with the formula HuggingFace uses.
std::optional<OneDnnActivation> onednn_activation(Activation activation) {
  switch (activation) {
    case Activation::none: return OneDnnActivation{"none", ""};
    case Activation::gelu_erf: return OneDnnActivation{"gelu", "none"};
    case Activation::gelu_tanh: return OneDnnActivation{"gelu", "tanh"};
    case Activation::relu: return OneDnnActivation{"relu", ""};
    case Activation::tanh: return OneDnnActivation{"tanh", ""};
    default: return std::nullopt;
  }
}

const char* lacks() { return reorder_weight() && linear_pointwise() ? nullptr : "oneDNN in PyTorch"; }

// In float with AVX-512, where it is ahead of panels (BERT-base 16x128: 1.23 against 1.37 s).
bool supports(const Product& p) {
  static const bool in_float = !cpu_isa().starts_with("avx2");
  const bool gated = p.epilogue.gate == Gate::pairs;
  if (!gated && !onednn_activation(p.epilogue.activation)) return false;
  if (p.b == &formats::bf16)
    return (p.a == DType::fp32 || p.a == DType::bf16) && (p.c == DType::fp32 || p.c == DType::bf16);
  return in_float && p.b == &formats::fp32 && p.a == DType::fp32 &&
         (p.c == DType::fp32 || (p.c == DType::bf16 && gated));
}

// rows [m, k] -> act(rows @ b^T + bias) [m, n], with a gate without the activation
at::Tensor multiply(const Product& p, const CpuData& data, const at::Tensor& rows) {
  std::optional<at::Tensor> bias;
  if (data.bias) bias = float_view(data.bias, {p.n});
  const bool gated = p.epilogue.gate == Gate::pairs;
  const OneDnnActivation act = *onednn_activation(gated ? Activation::none : p.epilogue.activation);
  return linear_pointwise()->call(rows, *static_cast<const at::Tensor*>(data.b), bias, act.name, Scalars(),
                                  act.algorithm);
}

Operand run_fp32(Context<Cpu>& context, const Product& p, const CpuData& data) {
  TorchProducts::Kept& kept = static_cast<TorchProducts*>(context.products)->kept_at(data.c);
  kept.tensors.clear();  // so that the allocator can hand out the same memory again
  at::Tensor& made = kept.tensors.emplace_back(multiply(p, data, float_view(data.a.as<float>(), {p.m, p.k})));
  const Operand result = Operand::of(made.const_data_ptr<float>());
  if (p.epilogue.gate == Gate::none) return result;
  const Operand out{data.c, &plain_format(p.c)};
  add_bias_gate<Cpu, float>(context, result, nullptr, p.epilogue.activation, p.m, p.epilogue.columns(p.n), out);
  kept.tensors.clear();
  return out;
}

// Each thread, of up to six (rows() gives no more for them), multiplies rows of its own, from kFewestRows each on, and
// rounds what goes in and widens what comes out for itself. Left to divide the work, oneDNN gave one of two threads all
// of it at some sizes (tiles of a Xeon, 768x768x3072: 1040 GFLOP/s, 2000 so).
Operand run_bf16(Context<Cpu>& context, const Product& p, const CpuData& data) {
  constexpr int64_t kFewestRows = 128;
  auto& products = *static_cast<TorchProducts*>(context.products);
  const int64_t cols = p.epilogue.columns(p.n);
  const Operand out{data.c, &plain_format(p.c)};
  if (p.m == 0) return out;
  const auto source = data.a.opaque ? static_cast<TorchProducts::Kept*>(data.a.data) : nullptr;
  const int64_t threads = products.threads(), chunks = p.m / threads < kFewestRows ? 1 : threads;
  const int64_t chunk_rows = source ? source->chunk_rows : ((p.m + chunks - 1) / chunks + 15) / 16 * 16;
  const int64_t count = (p.m + chunk_rows - 1) / chunk_rows;
  FTBERT_CHECK(!source || std::ssize(source->tensors) == count, "a product takes ", p.m,
               " rows of an operand that has ", std::ssize(source->tensors), " chunks of ", chunk_rows);
  const bool in_bf16 = p.c == DType::bf16, stays = in_bf16 && !data.in_one_piece;
  TorchProducts::Kept& kept = products.kept_at(data.c);
  kept.tensors.assign(stays ? count : 0, at::Tensor());  // gives the old ones back before there are new ones
  kept.chunk_rows = chunk_rows;
  const auto chunk = [&](int64_t i) {
    const int64_t first = i * chunk_rows, rows = std::min(chunk_rows, p.m - first);
    const at::Tensor read = source ? std::move(source->tensors[i]) : rows_in_bf16(data.a, first, rows, p.k);
    at::Tensor made = multiply(p, data, read);
    Operand to = out.from(first, cols);
    // The sums were float; bias and activation were added to them before they were rounded.
    if (p.epilogue.gate == Gate::pairs) {
      if (stays) kept.tensors[i] = at::empty({rows, cols}, made.options());
      if (stays) to.data = kept.tensors[i].mutable_data_ptr();
      Context<Cpu> own{&products};
      add_bias_gate<Cpu, float>(own, Operand::of(static_cast<const bfloat16_t*>(made.const_data_ptr())), nullptr,
                                p.epilogue.activation, rows, cols, to);
    } else if (stays)
      kept.tensors[i] = std::move(made);
    else if (in_bf16)
      std::memcpy(to.data, made.const_data_ptr(), made.nbytes());
    else
      float_view(to.as<float>(), {rows, cols}).copy_(made);
  };
  const auto multiply_chunks = [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;  // a new thread would not know that the caller wants none
    for (int64_t i = begin; i < end; ++i) chunk(i);
  };
  count == 1 ? multiply_chunks(0, 1) : at::parallel_for(0, count, 1, multiply_chunks);
  return stays ? Operand{.data = &kept, .format = out.format, .opaque = true} : out;
}

Operand run_product(Context<Cpu>& context, const Product& product, const CpuData& data) {
  return product.b == &formats::bf16 ? run_bf16(context, product, data) : run_fp32(context, product, data);
}

}  // namespace

const CpuKernel onednn_kernel{"oneDNN in PyTorch, packed weights", kPlainParts, supports, run_product, nullptr, lacks};
const LibraryKernel registered(onednn_kernel);

at::Tensor pack_for_onednn(const at::Tensor& weight) { return reorder_weight()->call(weight, std::nullopt); }

}  // namespace ftbert::binding
