#include "binding/gemm_torch.h"

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

#include "binding/forked.h"
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
  static const bool own = !has_onednn() || cpu_isa() == "avx2";
  return own;
}

at::Tensor view(const float* data, at::IntArrayRef sizes) {
  return at::from_blob(const_cast<float*>(data), sizes, at::TensorOptions().dtype(at::kFloat));
}

struct Fused {
  const char* name;
  const char* algorithm;
};

// The activations that oneDNN fuses with the formula HuggingFace uses; nullptr: not fused.
const Fused* fused(Activation activation) {
  static constexpr Fused none{"none", ""}, erf{"gelu", "none"}, tanh_gelu{"gelu", "tanh"}, relu{"relu", ""},
      tanh{"tanh", ""};
  switch (activation) {
    case Activation::none: return &none;
    case Activation::gelu_erf: return &erf;
    case Activation::gelu_tanh: return &tanh_gelu;
    case Activation::relu: return &relu;
    case Activation::tanh: return &tanh;
    default: return nullptr;
  }
}

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
  one_thread_if_forked();
  const at::Tensor plain = weight.detach().contiguous();
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

bool is_packed(const at::Tensor& weight) { return weight.is_mkldnn() || weight.dim() == 3; }

bool has_shape(const at::Tensor& weight, at::IntArrayRef shape) {
  if (weight.dim() != 3) return weight.sizes() == shape;
  return shape.size() == 2 && weight.size(0) == (shape[0] + weight.size(2) - 1) / weight.size(2) &&
         weight.size(1) == shape[1] && weight.size(2) == isa_kernels().panel_width;
}

at::Tensor unpack_weight(const at::Tensor& packed, int64_t n) {
  one_thread_if_forked();
  if (packed.is_mkldnn()) return packed.to_dense();
  return packed.transpose(1, 2).flatten(0, 1).narrow(0, 0, n).contiguous();
}

std::string torch_gemm_name() {
  return own_products() ? "panels of ftbert's own" : "oneDNN in PyTorch, packed weights";
}

int64_t TorchGemm::rows(int64_t left) const {
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

at::Tensor& TorchGemm::result_at(const float* place) {
  for (auto& [known, tensor] : results_)
    if (known == place) return tensor;
  return results_.emplace_back(place, at::Tensor()).second;
}

// What a product before this one left there, once; or as many parts, still undefined, as threads shall have rows of
// their own: from kFewestRows each on. With fewer all is one part, which oneDNN divides.
TorchGemm::Parts TorchGemm::parts_of(const float* a, int64_t m) {
  constexpr int64_t kFewestRows = 128;
  for (auto left = left_.begin(); left != left_.end(); ++left) {
    if (left->first != a) continue;
    Parts parts = std::move(left->second);
    left_.erase(left);
    FTBERT_CHECK(parts.m == m, "a product takes ", m, " rows of the ", parts.m, " that the one before it left");
    return parts;
  }
  const int64_t threads = this->threads();
  const int64_t count = m / threads < kFewestRows ? 1 : threads, rows = ((m + count - 1) / count + 15) / 16 * 16;
  return {m, rows, std::vector<at::Tensor>((m + rows - 1) / rows)};
}

// In bf16 each thread, of up to six (rows() gives no more for them), multiplies rows of its own, and rounds what goes
// in and widens what comes out for itself. Left to divide the work, oneDNN gave one of two threads all of it at some
// sizes (tiles of a Xeon, 768x768x3072: 1040 GFLOP/s, 2000 so).
const float* TorchGemm::linear_bf16(const Linear<float>& w, const float* a, int64_t m, Epilogue epilogue, float* out) {
  if (m == 0) return out;
  const at::Tensor& weight = *static_cast<const at::Tensor*>(w.packed);
  std::optional<at::Tensor> bias;
  if (epilogue.bias) bias = view(w.bias, {w.n});
  const Fused* act = fused(epilogue.activation);
  Parts input = parts_of(a, m);
  const int64_t parts = static_cast<int64_t>(input.tensors.size());
  const bool stays = act && epilogue.for_product;
  Parts left{m, input.rows, std::vector<at::Tensor>(stays ? parts : 0)};
  const auto multiply = [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;  // a new thread would not know that the caller wants none
    for (int64_t part = begin; part < end; ++part) {
      const int64_t first = part * input.rows, rows = std::min(input.rows, m - first);
      at::Tensor from = std::move(input.tensors[part]);
      if (!from.defined()) from = view(a + first * w.k, {rows, w.k}).to(at::kBFloat16);
      at::Tensor made =
          linear_pointwise()->call(from, weight, bias, act ? act->name : "none", Scalars(), act ? act->algorithm : "");
      // The sums were float; bias and activation were added to them before they were rounded.
      if (stays)
        left.tensors[part] = std::move(made);
      else if (epilogue.for_attention)
        std::memcpy(reinterpret_cast<bfloat16_t*>(out) + first * w.n, made.const_data_ptr(), made.nbytes());
      else
        view(out + first * w.n, {rows, w.n}).copy_(made);
    }
  };
  parts == 1 ? multiply(0, 1) : at::parallel_for(0, parts, 1, multiply);
  if (stays) left_.emplace_back(out, std::move(left));
  if (!act) {
    Context<Cpu> context{this};
    add_bias_act<Cpu, float>(context, out, nullptr, epilogue.activation, m, w.n);
  }
  return out;
}

bool TorchGemm::leaves_bf16(const Linear<float>& w) const {
  return w.packed && static_cast<const at::Tensor*>(w.packed)->scalar_type() == at::kBFloat16 && w.n % 2 == 0;
}

const float* TorchGemm::linear(const Linear<float>& w, const float* a, int64_t m, Epilogue epilogue, float* out) {
  Context<Cpu> context{this};
  const at::Tensor& weight = *static_cast<const at::Tensor*>(w.packed);
  if (!weight.is_mkldnn()) {
    isa_kernels().panel_product({.m = m,
                                 .n = w.n,
                                 .k = w.k,
                                 .a = a,
                                 .panels = weight.const_data_ptr<float>(),
                                 .bias = epilogue.bias ? w.bias : nullptr,
                                 .activation = epilogue.activation,
                                 .out = out});
    return out;
  }
  if (weight.scalar_type() == at::kBFloat16) return linear_bf16(w, a, m, epilogue, out);
  std::optional<at::Tensor> bias;
  if (epilogue.bias) bias = view(w.bias, {w.n});
  const Fused* act = fused(epilogue.activation);
  at::Tensor& slot = result_at(out);
  slot.reset();  // give the old result back first, so that the allocator can hand out the same memory again
  slot = linear_pointwise()->call(view(a, {m, w.k}), weight, bias, act ? act->name : "none", Scalars(),
                                  act ? act->algorithm : "");
  float* result = slot.mutable_data_ptr<float>();
  if (!act) add_bias_act<Cpu, float>(context, result, nullptr, epilogue.activation, m, w.n);
  return result;
}

int64_t TorchGemm::threads() const { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

void TorchGemm::each_alone(int64_t count, const std::function<void(int64_t i, CpuGemm& own)>& work) {
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;  // a new thread would not know that the caller wants none
    const OneThread alone;
    for (int64_t i = begin; i < end; ++i) {
      TorchGemm own;
      work(i, own);
    }
  });
}

void TorchGemm::gemm(const GemmShape& s, const float* a, const float* b, float* c) {
  at::Tensor result = view(c, {s.batch, s.m, s.n});
  const at::Tensor right = s.b_transposed ? view(b, {s.batch, s.n, s.k}).transpose(1, 2) : view(b, {s.batch, s.k, s.n});
  at::bmm_out(result, view(a, {s.batch, s.m, s.k}), right);
}

}  // namespace ftbert::binding
