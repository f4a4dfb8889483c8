// torch.ops.ftbert.*: the kernels that fill a cache of keys and values.
#include "binding/define_op.h"
#include "kernels/kernels.h"
#include "test_checks.h"

namespace ftbert::binding {
namespace {

// rows int32 [tokens]: where those of a token go in keys and values [cache_rows, kv_heads * head_size]; none for a row
// outside them.
void store(const Tensor& qkv, const Tensor& rows, int64_t heads, int64_t kv_heads, const Tensor& keys,
           const Tensor& values) {
  elements("qkv", qkv, 2);
  const Heads h = heads_of(qkv, heads, kv_heads);
  integers("rows", rows, qkv, at::kInt, qkv.size(0));
  rank("keys", keys, 2);
  same("keys", keys, qkv, {keys.size(0), h.kv_width()});
  same("values", values, qkv, {keys.size(0), h.kv_width()});
  if (qkv.numel() == 0) return;
  run(qkv, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    store_keys_values<Device, T>(call.context, h, data<T>(qkv), qkv.size(0),
                                 {data<int32_t>(rows), keys.size(0), data<T>(keys), data<T>(values)});
  });
}

// begins int32 [n]: rows from which on those of a prefix stand again in keys and values [rows, width].
void repeat(const Tensor& begins, int64_t prefix, const Tensor& keys, const Tensor& values) {
  elements("keys", keys, 2);
  same("values", values, keys, keys.sizes());
  FTBERT_CHECK(begins.dim() == 1, "begins: expected int32 [n], got ", describe(begins));
  integers("begins", begins, keys, at::kInt, begins.size(0));
  FTBERT_CHECK(prefix >= 0 && prefix <= keys.size(0), "prefix: expected 0 to ", keys.size(0), " rows, got ", prefix);
  if (keys.numel() == 0 || begins.numel() == 0) return;
  run(keys, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    repeat_prefix<Device, T>(call.context, keys.size(1), prefix, data<int32_t>(begins), begins.size(0), keys.size(0),
                             data<T>(keys), data<T>(values));
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ftbert, m) {
  define_op(m,
            "store_keys_values(Tensor qkv, Tensor rows, int heads, int kv_heads, Tensor(a!) keys, Tensor(b!) values) "
            "-> ()",
            &store);
  define_op(m, "repeat_prefix(Tensor begins, int prefix, Tensor(a!) keys, Tensor(b!) values) -> ()", &repeat);
}

}  // namespace ftbert::binding
