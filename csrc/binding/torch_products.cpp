#include "binding/torch_products.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <omp.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "binding/team.h"
#include "core/check.h"
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

bool has_onednn() { return reorder_weight() && linear_pointwise(); }

// In float. With AVX-512 oneDNN is ahead of panels (BERT-base 16x128: 1.23 against 1.37 s).
bool own_products() {
  static const bool own = !has_onednn() || cpu_isa().starts_with("avx2");
  return own;
}

at::Tensor view(const float* data, at::IntArrayRef sizes) {
  return at::from_blob(const_cast<float*>(data), sizes, at::TensorOptions().dtype(at::kFloat));
}

// Rows [first, first + rows) of a [m, k], rounded where they are float.
at::Tensor rows_in_bf16(const Operand& a, int64_t first, int64_t rows, int64_t k) {
  if (a.dtype != DType::bf16) return view(a.as<float>() + first * k, {rows, k}).to(at::kBFloat16);
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

// Where a product leaves floats though byte rows were wished for, which it does not store: its caller makes them.
Operand floats_at(const Operand& out) { return Operand::of(static_cast<float*>(out.data)); }

// While it lives this thread starts no others, whatever the environment says of nested parallel regions.
struct OneThread {
  const int before = omp_get_max_threads();
  OneThread() { omp_set_num_threads(1); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;
  ~OneThread() { omp_set_num_threads(before); }
};

}  // namespace

at::Tensor pack_weight(const at::Tensor& weight) {
  const Team team;
  const at::Tensor plain = weight.detach().contiguous();
  if (plain.scalar_type() == at::kChar) {
    const IsaKernels& isa = isa_kernels();
    const int64_t n = plain.size(0), k = plain.size(1);
    FTBERT_CHECK(isa.int8, "this CPU (", cpu_isa(),
                 ") has no instructions for products of int8; load the model in fp32");
    at::Tensor panels = at::empty({isa.int8_panel_bytes(n, k)}, plain.options().dtype(at::kByte));
    isa.pack_int8(plain.const_data_ptr<int8_t>(), n, k, panels.mutable_data_ptr());
    return panels;
  }
  if (plain.scalar_type() == at::kFloat && own_products()) {
    const int64_t n = plain.size(0), k = plain.size(1), width = isa_kernels().panel_width;
    at::Tensor panels = at::empty({(n + width - 1) / width, k, width}, plain.options());
    isa_kernels().pack_panels(plain.const_data_ptr<float>(), n, k, panels.mutable_data_ptr<float>());
    return panels;
  }
  FTBERT_CHECK(has_onednn(),
               "this PyTorch has no oneDNN, which products in bf16 on the CPU need; load the model in fp32");
  return reorder_weight()->call(plain, std::nullopt);
}

bool is_packed(const at::Tensor& weight) {
  return weight.is_mkldnn() || weight.dim() == 3 || weight.scalar_type() == at::kByte;
}

bool has_shape(const at::Tensor& weight, at::IntArrayRef shape) {
  if (weight.scalar_type() == at::kByte)
    return shape.size() == 2 && isa_kernels().int8 && weight.dim() == 1 &&
           weight.numel() == isa_kernels().int8_panel_bytes(shape[0], shape[1]);
  if (weight.dim() != 3) return weight.sizes() == shape;
  return shape.size() == 2 && weight.size(0) == (shape[0] + weight.size(2) - 1) / weight.size(2) &&
         weight.size(1) == shape[1] && weight.size(2) == isa_kernels().panel_width;
}

at::Tensor unpack_weight(const at::Tensor& packed, at::IntArrayRef shape) {
  const Team team;
  if (packed.is_mkldnn()) return packed.to_dense();
  if (packed.scalar_type() == at::kByte) {
    at::Tensor weight = at::empty(shape, packed.options().dtype(at::kChar));
    isa_kernels().unpack_int8(packed.const_data_ptr(), shape[0], shape[1], weight.mutable_data_ptr<int8_t>());
    return weight;
  }
  return packed.transpose(1, 2).flatten(0, 1).narrow(0, 0, shape[0]).contiguous();
}

std::string torch_products_name() {
  return own_products() ? "panels of ftbert's own" : "oneDNN in PyTorch, packed weights";
}

int64_t TorchProducts::rows(int64_t left) const {
  if (own_products()) return left;
  // From 48 rows on a row costs the same to 10 % whatever the size, and from 96 on to 5 % (2 cores, n and k 384 to
  // 3072). So a remainder may be rounded up a little, or left for a product of its own.
  static constexpr int64_t kSizes[] = {768, 512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 8, 4, 2, 1};
  int64_t up = 0;
  for (const int64_t size : kSizes) {
    if (size >= left && size <= left + kGemmRowSlack<Cpu>) up = size;
    if (size <= left) return up ? up : size;
  }
  return left;
}

auto TorchProducts::kept_at(const void* out) -> Kept& {
  for (auto& [known, kept] : kept_)
    if (known == out) return kept;
  return kept_.emplace_back(out, Kept()).second;
}

// In bf16 each thread, of up to six (rows() gives no more for them), multiplies rows of its own, from kFewestRows each
// on, and rounds what goes in and widens what comes out for itself. Left to divide the work, oneDNN gave one of two
// threads all of it at some sizes (tiles of a Xeon, 768x768x3072: 1040 GFLOP/s, 2000 so).
Operand TorchProducts::linear_bf16(const Linear<float>& linear, const Operand& a, int64_t m, Epilogue epilogue,
                                   const Operand& out, bool in_one_piece) {
  constexpr int64_t kFewestRows = 128;
  const int64_t n = linear.weight.n, k = linear.weight.k;
  if (m == 0) return out;
  const at::Tensor& weight = *static_cast<const at::Tensor*>(linear.weight.packed);
  std::optional<at::Tensor> bias;
  if (epilogue.bias && linear.bias) bias = view(linear.bias, {n});
  const bool gated = epilogue.gate == Gate::pairs;
  const int64_t cols = epilogue.columns(n);
  const std::optional<OneDnnActivation> act = onednn_activation(gated ? Activation::none : epilogue.activation);
  Kept* const source = a.opaque ? static_cast<Kept*>(a.data) : nullptr;
  const int64_t threads = this->threads(), chunks = m / threads < kFewestRows ? 1 : threads;
  const int64_t chunk_rows = source ? source->chunk_rows : ((m + chunks - 1) / chunks + 15) / 16 * 16;
  const int64_t count = (m + chunk_rows - 1) / chunk_rows;
  FTBERT_CHECK(!source || std::ssize(source->tensors) == count, "a product takes ", m, " rows of an operand that has ",
               std::ssize(source->tensors), " chunks of ", chunk_rows);
  const bool in_bf16 = act && out.dtype == DType::bf16, stays = in_bf16 && !in_one_piece;
  const Operand stored = in_bf16 ? out : floats_at(out);
  Kept& kept = kept_at(out.data);
  kept.tensors.assign(stays ? count : 0, at::Tensor());  // gives the old ones back before there are new ones
  kept.chunk_rows = chunk_rows;
  const auto multiply = [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;  // a new thread would not know that the caller wants none
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i * chunk_rows, rows = std::min(chunk_rows, m - first);
      const at::Tensor read = source ? std::move(source->tensors[i]) : rows_in_bf16(a, first, rows, k);
      at::Tensor made =
          linear_pointwise()->call(read, weight, bias, act ? act->name : "none", Scalars(), act ? act->algorithm : "");
      // The sums were float; bias and activation were added to them before they were rounded.
      if (gated) {
        if (stays) kept.tensors[i] = at::empty({rows, cols}, made.options());
        Operand to = stored.from(first, cols);
        if (stays) to.data = kept.tensors[i].mutable_data_ptr();
        Context<Cpu> context{this};
        add_bias_gate<Cpu, float>(context, Operand::of(static_cast<const bfloat16_t*>(made.const_data_ptr())), nullptr,
                                  epilogue.activation, rows, cols, to);
      } else if (stays)
        kept.tensors[i] = std::move(made);
      else if (in_bf16)
        std::memcpy(static_cast<bfloat16_t*>(out.data) + first * n, made.const_data_ptr(), made.nbytes());
      else
        view(stored.as<float>() + first * n, {rows, n}).copy_(made);
    }
  };
  count == 1 ? multiply(0, 1) : at::parallel_for(0, count, 1, multiply);
  if (stays) return {.data = &kept, .dtype = out.dtype, .opaque = true};
  if (!act && !gated) {
    Context<Cpu> context{this};
    add_bias_act<Cpu, float>(context, stored.as<float>(), nullptr, epilogue.activation, m, n);
  }
  return stored;
}

Operand TorchProducts::linear(const Linear<float>& linear, const Operand& a, int64_t m, Epilogue epilogue,
                              const Operand& out, bool in_one_piece) {
  Context<Cpu> context{this};
  const Matrix& w = linear.weight;
  const at::Tensor& weight = *static_cast<const at::Tensor*>(w.packed);
  if (w.format == &formats::int8) {
    const bool gated = epilogue.gate == Gate::pairs, rounded = !gated && out.dtype == DType::bf16;
    auto* const c = static_cast<float*>(out.data);
    isa_kernels().int8_product({.m = m,
                                .n = w.n,
                                .k = w.k,
                                .a = a.byte_rows(),
                                .panels = weight.const_data_ptr(),
                                .scales = w.scales<float>(),
                                .bias = epilogue.bias ? linear.bias : nullptr,
                                .activation = epilogue.activation,
                                .out = gated || rounded ? nullptr : c,
                                .gated = gated ? c : nullptr,
                                .rounded = rounded ? static_cast<bfloat16_t*>(out.data) : nullptr});
    return rounded ? out : Operand::of(c);
  }
  if (w.format == &formats::q8_0) {
    const bool gated = epilogue.gate == Gate::pairs;
    auto* const c = static_cast<float*>(out.data);
    isa_kernels().q8_0_product({.m = m,
                                .n = w.n,
                                .k = w.k,
                                .a = a.as<float>(),
                                .panels = weight.const_data_ptr(),
                                .bias = epilogue.bias ? linear.bias : nullptr,
                                .activation = epilogue.activation,
                                .out = gated ? nullptr : c,
                                .gated = gated ? c : nullptr});
    return Operand::of(c);
  }
  if (!weight.is_mkldnn()) {
    const bool gated = epilogue.gate == Gate::pairs;
    auto* const c = static_cast<float*>(out.data);
    isa_kernels().panel_product({.m = m,
                                 .n = w.n,
                                 .k = w.k,
                                 .a = a.as<float>(),
                                 .panels = weight.const_data_ptr<float>(),
                                 .bias = epilogue.bias ? linear.bias : nullptr,
                                 .activation = epilogue.activation,
                                 .out = gated ? c + m * epilogue.columns(w.n) : c,
                                 .gated = gated ? c : nullptr});
    return Operand::of(c);
  }
  if (w.format == &formats::bf16) return linear_bf16(linear, a, m, epilogue, out, in_one_piece);
  std::optional<at::Tensor> bias;
  if (epilogue.bias && linear.bias) bias = view(linear.bias, {w.n});
  const bool gated = epilogue.gate == Gate::pairs;
  const std::optional<OneDnnActivation> act = onednn_activation(gated ? Activation::none : epilogue.activation);
  Kept& kept = kept_at(out.data);
  kept.tensors.clear();  // so that the allocator can hand out the same memory again
  at::Tensor& made = kept.tensors.emplace_back(linear_pointwise()->call(
      view(a.as<float>(), {m, w.k}), weight, bias, act ? act->name : "none", Scalars(), act ? act->algorithm : ""));
  float* const result = made.mutable_data_ptr<float>();
  if (gated) {
    const Operand stored = out.dtype == DType::bf16 ? out : floats_at(out);
    add_bias_gate<Cpu, float>(context, Operand::of(result), nullptr, epilogue.activation, m, w.n / 2, stored);
    kept.tensors.clear();
    return stored;
  }
  if (!act) add_bias_act<Cpu, float>(context, result, nullptr, epilogue.activation, m, w.n);
  return Operand::of(result);
}

int64_t TorchProducts::threads() const { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

void TorchProducts::each_alone(int64_t count, const std::function<void(int64_t i, CpuProducts& own)>& work) {
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;  // a new thread would not know that the caller wants none
    const OneThread alone;
    for (int64_t i = begin; i < end; ++i) {
      TorchProducts own;
      work(i, own);
    }
  });
}

void TorchProducts::gemm(const Product& s, const float* a, const float* b, float* c) {
  at::Tensor result = view(c, {s.batch, s.m, s.n});
  const at::Tensor right = s.b_transposed ? view(b, {s.batch, s.n, s.k}).transpose(1, 2) : view(b, {s.batch, s.k, s.n});
  at::bmm_out(result, view(a, {s.batch, s.m, s.k}), right);
}

}  // namespace ftbert::binding
