// torch.ops.ftbert.*: the kernels of norms.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "binding/define_op.h"
#include "kernels/kernels.h"
#include "norm_words.h"
#include "test_checks.h"

namespace ftbert::binding {
namespace {

// A table of `cols` columns, of x's dtype and device: its rows; 0 where there is none.
int64_t table_rows(const char* name, const OptionalTensor& t, const Tensor& x, int64_t cols) {
  if (!t) return 0;
  rank(name, *t, 2);
  same(name, t, x, {t->size(0), cols});
  return t->size(0);
}

// What is stored beside a norm, if anything: E4M3 with its scale, or byte rows and what their columns are multiplied
// by.
Operand copy_of(const OptionalTensor& copy, const OptionalTensor& scale, const Tensor& like, int64_t rows,
                int64_t cols) {
  if (copy && copy->scalar_type() == at::kByte) return byte_rows("copy", *copy, scale, like, rows, cols);
  return scaled_e4m3("copy", copy, scale, like, {rows, cols});
}

Tensor embeddings(const Tensor& ids, const OptionalTensor& types, const OptionalTensor& token_index, const Tensor& pos,
                  const Tensor& word, const OptionalTensor& position, const OptionalTensor& token_type,
                  const OptionalTensor& gamma, const OptionalTensor& beta, double eps, const std::string& kind,
                  double offset, const std::string& rounding, double scale, const OptionalTensor& copy,
                  const OptionalTensor& copy_scale, const OptionalTensor& word_scale) {
  if (word_scale) {
    rank("word", word, 2);
    FTBERT_CHECK(word.scalar_type() == at::kChar, "word: expected Char with scales of rows, got ", describe(word));
    plain("word", word);
    scales("word_scale", *word_scale, word, word.size(0));
  } else {
    elements("word", word, 2);
  }
  const Tensor& like = !word_scale ? word : token_type ? *token_type : *word_scale;  // of the result's type
  const int64_t cols = word.size(1);
  integers("positions", pos, word, at::kInt, 0);
  const int64_t tokens = pos.size(0);
  integers("input_ids", ids, word, at::kLong, token_index ? 0 : tokens);
  if (types) integers("token_type_ids", *types, word, at::kLong, ids.size(0));
  if (token_index) integers("token_index", *token_index, word, at::kLong, tokens);
  const int64_t positions = table_rows("position", position, like, cols);
  const int64_t kinds = table_rows("token_type", token_type, like, cols);
  same("gamma", gamma, like, {cols});
  same("beta", beta, like, {cols});
  const NormWords norm(gamma, beta, eps, kind, offset, rounding);
  FTBERT_CHECK(!token_type || types || kinds > 0, "token_type: expected a row for type 0, got ", describe(*token_type));
  if (token_index) check_range("token_index", *token_index, tokens, 0, ids.size(0));
  const int64_t* const read = data<int64_t>(token_index);
  check_range("input_ids", ids, tokens, 0, word.size(0), read);
  if (types && token_type) check_range("token_type_ids", *types, tokens, 0, kinds, read);
  if (position) check_range("positions", pos, tokens, 0, positions);
  const Operand beside = copy_of(copy, copy_scale, like, tokens, cols);
  Tensor out = at::empty({tokens, cols}, like.options());
  run(like, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    const Operand words =
        word_scale ? Operand{const_cast<int8_t*>(data<int8_t>(word)), &formats::int8, data<float>(word_scale)}
                   : Operand::of(data<T>(word));
    const EmbeddingTables<T> tables{words, data<T>(position),       data<T>(token_type),      word.size(0), positions,
                                    kinds, norm.of<T>(gamma, beta), static_cast<float>(scale)};
    embeddings_layernorm<Device, T>(call.context, tables, data<int64_t>(ids), data<int64_t>(types),
                                    data<int64_t>(token_index), data<int32_t>(pos), tokens, cols, data<T>(out), beside);
  });
  return out;
}

std::tuple<Tensor, Tensor> layernorm(const Tensor& x, const OptionalTensor& bias, const OptionalTensor& input,
                                     const OptionalTensor& gamma, const OptionalTensor& beta, double eps,
                                     const std::string& kind, double offset, const std::string& rounding, bool keep_sum,
                                     const OptionalTensor& copy, const OptionalTensor& copy_scale) {
  elements("x", x, 2);
  const int64_t cols = x.size(1);
  same("bias", bias, x, {cols});
  same("input", input, x, x.sizes());
  same("gamma", gamma, x, {cols});
  same("beta", beta, x, {cols});
  const NormWords norm(gamma, beta, eps, kind, offset, rounding);
  const Operand beside = copy_of(copy, copy_scale, x, x.size(0), cols);
  const auto made_if = [&](bool made) { return made ? at::empty_like(x) : at::empty({0, cols}, x.options()); };
  Tensor out = made_if(!keep_sum || !beside), sum = made_if(keep_sum);
  if (x.numel() == 0) return {out, sum};
  run(x, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    // As the layers: with a sum for the next product, alone for the stream.
    const Output<T> made = keep_sum
                               ? Output<T>{.sum = data<T>(sum), .copy = beside ? beside : Operand::of(data<T>(out))}
                               : Output<T>{.normed = data<T>(out), .copy = beside};
    add_bias_input_layernorm<Device, T>(call.context, data<T>(x), data<T>(bias), data<T>(input),
                                        norm.of<T>(gamma, beta), x.size(0), cols, made);
  });
  return {out, sum};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ftbert, m) {
  define_op(m,
            "embeddings_layernorm(Tensor input_ids, Tensor? token_type_ids, Tensor? token_index, Tensor positions, "
            "Tensor word, Tensor? position, Tensor? token_type, Tensor? gamma, Tensor? beta, float eps, str "
            "kind='layer', float offset=0, str rounding='once', float scale=1, Tensor(a!)? copy=None, Tensor? "
            "copy_scale=None, Tensor? word_scale=None) -> Tensor",
            &embeddings);
  define_op(
      m,
      "add_bias_input_layernorm(Tensor x, Tensor? bias, Tensor? input, Tensor? gamma, Tensor? beta, float eps, str "
      "kind='layer', float offset=0, str rounding='once', bool sum=True, Tensor(a!)? copy=None, Tensor? "
      "copy_scale=None) -> (Tensor, Tensor)",
      &layernorm);
}

}  // namespace ftbert::binding
