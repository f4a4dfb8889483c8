// The core by itself, without Python or torch: a small random model through Encoder<Cpu, float> against a
// double-precision reference written here as plainly as possible.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <list>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/crowding.h"
#include "core/format.h"
#include "core/gpu.h"
#include "encoder.h"
#include "gemm/cpu/kernel.h"
#include "gemm/gemm.h"
#include "kernels/isa.h"
#include "kernels/kernels.h"
#include "layers/kv_cache.h"
#include "layers/positions.h"

namespace ftbert {
namespace {

using Tensors = std::map<std::string, std::vector<float>>;
using Row = std::vector<double>;

ModelConfig make_config(int hidden, int heads, const std::string& activation, NormPlace place = NormPlace::post,
                        int layers = 2) {
  const NormConfig norm{.kind = NormKind::layer, .eps = 1e-12};
  const int64_t size = hidden / heads;
  ModelConfig config{.vocab = 50,
                     .hidden = hidden,
                     .embedding = hidden,
                     .max_positions = 40,
                     .token_types = 2,
                     .embedding_norm = norm,
                     .pooler = true};
  if (place == NormPlace::pre) config.final_norm = norm;
  for (int i = 0; i < layers; ++i)
    config.layers.push_back(
        {.norm_place = place,
         .attention = {.heads = {.count = heads, .kv = heads, .size = size, .scale = 1 / std::sqrt(1.0f * size)}},
         .attention_norm = norm,
         .ffn = {.inter = 2 * hidden + 8, .activation = parse_activation(activation)},
         .ffn_norm = norm,
         .weights_of = i});
  return config;
}

// LayerNorm weights and biases away from 1 and 0, else errors in them would not show. Matrices so that what they give
// has the same size at any width: scores that grow with it make softmax a choice, which magnifies rounding tenfold.
Tensors random_weights(const ModelConfig& config) {
  std::mt19937 engine(0);
  std::normal_distribution<float> normal(0, 0.3f);
  Tensors tensors;
  for (const WeightSpec& spec : weight_specs(config)) {
    int64_t count = 1;
    for (const int64_t size : spec.shape) count *= size;
    std::vector<float>& values = tensors[spec.name];
    values.resize(count);
    const bool gamma = spec.name.find("norm.weight") != std::string::npos;
    const float scale = spec.matrix ? std::sqrt(32.0f / static_cast<float>(spec.shape[1])) : 1.0f;
    for (float& value : values) value = scale * normal(engine) + (gamma ? 1.0f : 0.0f);
  }
  return tensors;
}

// By name, matrices with scales as their kernel reads them.
struct PackedMatrix {
  const Format* format = nullptr;
  std::vector<char> bytes;
};
using PackedMatrices = std::map<std::string, PackedMatrix>;

// Stores the matrices of which the config names a format in it. `tensors` become what is stored stands for, and get the
// scales: powers of 2, so that those of blocks are the same in fp16.
PackedMatrices pack_matrices(const ModelConfig& config, Tensors& tensors) {
  PackedMatrices packed;
  for (const WeightSpec& spec : weight_specs(config)) {
    if (!spec.matrix || !spec.type) continue;
    const int64_t n = spec.shape[0], k = spec.shape[1], block = spec.type->block > 0 ? spec.type->block : k;
    std::vector<float>& weight = tensors[spec.name];
    std::vector<int8_t> numbers(n * k);
    std::vector<float> scales(n * k / block);
    std::vector<half_t> halves;
    for (int64_t i = 0; i < n * k / block; ++i) {
      float largest = 0;
      for (int64_t d = 0; d < block; ++d) largest = std::max(largest, std::abs(weight[i * block + d]));
      const int exponent = static_cast<int>(std::ceil(std::log2(largest / 127)));
      scales[i] = std::exp2(static_cast<float>(exponent));
      halves.push_back({static_cast<uint16_t>((exponent + 15) << 10)});
      for (int64_t d = i * block; d < (i + 1) * block; ++d) {
        numbers[d] = static_cast<int8_t>(std::lround(weight[d] / scales[i]));
        weight[d] = static_cast<float>(numbers[d]) * scales[i];
      }
    }
    const WeightLayout& layout = *kernel_for(*spec.type)->layout;
    PackedMatrix& to = packed[spec.name] = {spec.type, std::vector<char>(layout.bytes(n, k))};
    layout.pack(numbers.data(), halves.data(), n, k, to.bytes.data());
    tensors[scales_of(spec).matrix] = spec.type->inside ? std::vector<float>() : scales;
    if (spec.type->other) tensors[scales_of(spec).input].assign(k, 1.0f);
  }
  return packed;
}

Weights<float> bind_tensors(const ModelConfig& config, const Tensors& tensors, const PackedMatrices& packed = {}) {
  return bind_weights<float>(config, [&](const std::string& name) -> Matrix {
    if (const auto it = packed.find(name); it != packed.end())
      return {.data = it->second.bytes.data(), .format = it->second.format, .kernel = kernel_for(*it->second.format)};
    const auto it = tensors.find(name);
    FTBERT_CHECK(it != tensors.end(), "no tensor ", name);
    return {.data = it->second.empty() ? nullptr : it->second.data(), .kernel = &cblas_kernel};
  });
}

// ---- the reference: one sequence at a time, double, no tricks -----------------------------------------------------

class Reference {
 public:
  Reference(const ModelConfig& config, const Tensors& tensors) : c_(config), tensors_(tensors) {}

  std::vector<Row> forward(const std::vector<int64_t>& ids, const std::vector<int64_t>& types,
                           const std::vector<int64_t>& positions, const std::vector<int64_t>& columns) const {
    std::vector<Row> x;
    for (size_t t = 0; t < ids.size(); ++t) {
      Row row(c_.hidden);
      for (int64_t j = 0; j < c_.hidden; ++j)
        row[j] = c_.embedding_scale * at("embeddings.word", ids[t] * c_.hidden + j) +
                 (c_.positions == PositionKind::none ? 0 : at("embeddings.position", positions[t] * c_.hidden + j)) +
                 at("embeddings.token_type", types[t] * c_.hidden + j);
      x.push_back(norm("embeddings.norm", c_.embedding_norm, row));
    }
    const auto normed = [&](const std::string& name, const NormConfig& config, std::vector<Row> rows) {
      for (Row& row : rows) row = norm(name, config, row);
      return rows;
    };
    // x with what `block` makes of it added.
    const auto add_block = [&](const std::string& name, NormPlace place, const NormConfig& outer,
                               const NormConfig& of_result, const auto& block) {
      const bool pre = place == NormPlace::pre;
      const std::vector<Row> made = block(pre ? normed(name + ".norm", outer, x) : x);
      for (size_t t = 0; t < x.size(); ++t) {
        x[t] = sum(norm(name + ".result_norm", of_result, made[t]), x[t]);
        if (!pre) x[t] = norm(name + ".norm", outer, x[t]);
      }
    };
    for (int64_t i = 0; i < c_.depth(); ++i) {
      const LayerConfig& l = c_.layers[i];
      const std::string layer = "layers." + std::to_string(i) + ".";
      add_block(layer + "attention", l.norm_place, l.attention_norm, l.attention_result_norm,
                [&](const std::vector<Row>& read) {
                  std::vector<Row> made;
                  for (const Row& row : attention(layer, l.attention, columns, read))
                    made.push_back(linear(layer + "attention.out", row));
                  return made;
                });
      add_block(layer + "ffn", l.norm_place, l.ffn_norm, l.ffn_result_norm, [&](const std::vector<Row>& read) {
        std::vector<Row> made;
        for (const Row& row : read) {
          const Row up = linear(layer + "ffn.up", row);
          Row inner;
          for (int64_t j = 0; j < l.ffn.inter; ++j)
            inner.push_back(l.ffn.gated ? activate(up[2 * j]) * up[2 * j + 1] : activate(up[j]));
          made.push_back(linear(layer + "ffn.down", inner));
        }
        return made;
      });
    }
    return normed("final_norm", c_.final_norm, x);
  }

  Row pool(const Row& first) const {
    Row row = linear("pooler", first);
    for (double& value : row) value = std::tanh(value);
    return row;
  }

 private:
  double at(const std::string& name, int64_t i) const { return tensors_.at(name)[i]; }

  // Without a bias where there is none.
  Row linear(const std::string& name, const Row& x) const {
    const std::vector<float>& weight = tensors_.at(name + ".weight");
    Row y(weight.size() / x.size());
    if (const auto bias = tensors_.find(name + ".bias"); bias != tensors_.end())
      y.assign(bias->second.begin(), bias->second.end());
    for (size_t n = 0; n < y.size(); ++n)
      for (size_t k = 0; k < x.size(); ++k) y[n] += x[k] * weight[n * x.size() + k];
    return y;
  }

  Row norm(const std::string& name, const NormConfig& config, Row x) const {
    if (config.kind == NormKind::none) return x;
    double mean = 0, variance = 0;
    if (config.kind == NormKind::layer)
      for (const double value : x) mean += value / x.size();
    for (const double value : x) variance += (value - mean) * (value - mean) / x.size();
    for (size_t j = 0; j < x.size(); ++j)
      x[j] = (x[j] - mean) / std::sqrt(variance + config.eps) * (at(name + ".weight", j) + config.offset) +
             (config.bias ? at(name + ".bias", j) : 0.0);
    return x;
  }

  static Row sum(Row a, const Row& b) {
    for (size_t j = 0; j < a.size(); ++j) a[j] += b[j];
    return a;
  }

  double activate(double x) const {
    switch (c_.layers[0].ffn.activation) {
      case Activation::gelu_erf: return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
      case Activation::gelu_tanh: return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
      case Activation::relu: return std::max(x, 0.0);
      case Activation::silu: return x / (1 + std::exp(-x));
      default: throw Error("the test's reference lacks this activation");
    }
  }

  // A head of queries or keys, normed and turned.
  Row head_at(const std::string& name, const AttentionConfig& c, int64_t column, Row head) const {
    if (c.qk_norm) head = norm(name, *c.qk_norm, head);
    if (!c.rotary) return head;
    const Rotary& r = *c.rotary;
    for (int64_t i = 0; i < r.dims / 2; ++i) {
      const int64_t a = r.interleaved ? 2 * i : i, b = r.interleaved ? a + 1 : a + r.dims / 2;
      const double angle = static_cast<double>(column) * r.frequencies[i], x = head[a], y = head[b];
      head[a] = r.amplitude * (x * std::cos(angle) - y * std::sin(angle));
      head[b] = r.amplitude * (y * std::cos(angle) + x * std::sin(angle));
    }
    return head;
  }

  std::vector<Row> attention(const std::string& layer, const AttentionConfig& c, const std::vector<int64_t>& columns,
                             const std::vector<Row>& x) const {
    const Heads& heads = c.heads;
    std::vector<Row> qkv, out;
    for (const Row& row : x) {
      Row made = linear(layer + "attention.qkv", row);
      for (int64_t h = 0; h < heads.count + heads.kv; ++h) {
        const auto first = made.begin() + h * heads.size;
        const std::string name = layer + (h < heads.count ? "attention.q_norm" : "attention.k_norm");
        const Row turned = head_at(name, c, columns[qkv.size()], Row(first, first + heads.size));
        std::copy(turned.begin(), turned.end(), first);
      }
      qkv.push_back(made);
    }
    const int length = static_cast<int>(x.size());
    for (int query = 0; query < length; ++query) {
      Row context(heads.width(), 0.0);
      for (int64_t head = 0; head < heads.count; ++head) {
        const int64_t first = head * heads.size, kv = head / (heads.count / heads.kv) * heads.size;
        Row weight(x.size());
        double total = 0;
        for (int key = c.window.begin(query); key < c.window.end(query, length); ++key) {
          double score = 0;
          for (int64_t d = 0; d < heads.size; ++d) score += qkv[query][first + d] * qkv[key][heads.width() + kv + d];
          total += weight[key] = std::exp(score * heads.scale);
        }
        for (int key = 0; key < length; ++key)
          for (int64_t d = 0; d < heads.size; ++d)
            context[first + d] += weight[key] / total * qkv[key][heads.width() + heads.kv_width() + kv + d];
      }
      out.push_back(context);
    }
    return out;
  }

  const ModelConfig& c_;
  const Tensors& tensors_;
};

// ---- the core, called as a C++ program would ----------------------------------------------------------------------

struct PaddedIds {
  int64_t batch, seq;
  std::vector<int64_t> ids, types;  // [batch, seq]
  std::vector<uint8_t> mask;        // [batch, seq]
};

struct Offsets {
  std::vector<int32_t> cu_seqlens, to_packed;
  std::vector<int64_t> to_padded;
  PaddingInfo info{};
};

Offsets offsets(const std::vector<uint8_t>& mask, int64_t batch, int64_t seq) {
  Offsets o;
  o.cu_seqlens.resize(batch + 1);
  o.to_packed.resize(batch * seq);
  o.to_padded.resize(batch * seq);
  Context<Cpu> context{&cblas_products()};
  padding_offsets<Cpu, uint8_t>(context, mask.data(), batch, seq, o.cu_seqlens.data(), o.to_padded.data(),
                                o.to_packed.data(), &o.info);
  return o;
}

// Rows that are padded on the right, holed, padded on the left, empty and full; garbage ids at padding.
PaddedIds sample_batch() {
  const std::vector<std::string> rows = {"11111000", "10110100", "00011111", "00000000", "11111111"};
  PaddedIds b{static_cast<int64_t>(rows.size()), static_cast<int64_t>(rows[0].size()), {}, {}, {}};
  std::mt19937 engine(1);
  for (const std::string& row : rows)
    for (const char kept : row) {
      b.ids.push_back(kept == '1' ? static_cast<int64_t>(engine() % 50) : -7);
      b.types.push_back(kept == '1' ? static_cast<int64_t>(engine() % 2) : 99);
      b.mask.push_back(kept == '1');
    }
  return b;
}

struct Output {
  std::vector<float> hidden, first, last, named, pooled;
};

// Every third token, then all from the last on.
std::vector<int64_t> some_tokens(int64_t tokens) {
  std::vector<int64_t> some;
  for (int64_t t = 0; t < tokens; t += 3) some.push_back(t);
  for (int64_t t = tokens; t-- > 0;) some.push_back(t);
  return some;
}

Output run_core(const Encoder<Cpu, float>& encoder, const PaddedIds& b, const Offsets& o) {
  Context<Cpu> context{&cblas_products()};
  const int64_t cols = encoder.config().hidden;
  Batch batch{.sequences = Sequences::of_tokens(o.cu_seqlens.data(), b.batch, o.info.max_seqlen, o.info.tokens),
              .ids = b.ids.data(),
              .types = b.types.data(),
              .to_padded = o.to_padded.data(),
              .seq = b.seq};
  std::vector<int32_t> places(2 * o.info.tokens + 256);
  Workspace memory(places.data(), places.size() * sizeof(int32_t));
  const Positions positions = Positions::take(memory, encoder.config(), o.info.tokens, /*padded=*/true);
  find_positions(context, encoder.config(), batch, o.info.tokens, positions);
  batch.positions = positions.ids;
  batch.columns = positions.columns;
  const auto run = [&](const OutputRows& rows) {
    batch.rows = rows;
    const auto plan = encoder.plan(context, batch);
    // What is read before it is written shows, and what is written behind.
    std::vector<char> memory(plan.bytes + (1 << 20), 0x7f);
    std::vector<float> out(rows_with_slack<Cpu>(batch.output_rows()) * cols);
    encoder.forward(context, batch, plan, Workspace(memory.data(), plan.bytes), out.data());
    FTBERT_CHECK(std::count(memory.begin() + plan.bytes, memory.end(), 0x7f) == 1 << 20,
                 "forward writes past its workspace");
    return out;
  };
  const std::vector<int64_t> some = some_tokens(o.info.tokens);
  Output out{run({}), run({RowKind::first}), run({RowKind::last}),
             run({RowKind::any, some.data(), static_cast<int64_t>(some.size())})};
  out.pooled.resize(out.first.size());
  encoder.pooler(context, out.first.data(), o.cu_seqlens.data(), b.batch, out.pooled.data());
  out.hidden.resize(o.info.tokens * cols);
  for (std::vector<float>* rows : {&out.first, &out.last, &out.pooled}) rows->resize(b.batch * cols);
  out.named.resize(some.size() * cols);
  return out;
}

double difference(const std::vector<float>& got, const std::vector<Row>& want) {
  double largest = 0;
  size_t i = 0;
  for (const Row& row : want)
    for (const double value : row) {
      const double d = std::abs(got.at(i++) - value);
      largest = d <= largest ? largest : d;  // NaN stays visible
    }
  FTBERT_CHECK(i == got.size(), "expected ", i, " values, got ", got.size());
  return largest;
}

// ---- tests --------------------------------------------------------------------------------------------------------

void expect(bool condition, const std::string& words) { FTBERT_CHECK(condition, words); }

// The whole model against the reference; fused and general path must both pass.
void forward_matches(const ModelConfig& config, AttentionPath path, double most = 2e-5) {
  Tensors tensors = random_weights(config);
  const PackedMatrices packed = pack_matrices(config, tensors);
  Context<Cpu> context{&cblas_products()};
  std::list<std::vector<float>> kept;
  const Encoder<Cpu, float> encoder(context, config, bind_tensors(config, tensors, packed), path,
                                    [&](int64_t floats) { return kept.emplace_back(floats).data(); });
  const PaddedIds b = sample_batch();
  const Offsets o = offsets(b.mask, b.batch, b.seq);
  const Output got = run_core(encoder, b, o);

  const Reference reference(config, tensors);
  std::vector<Row> want, want_first, want_last, want_named, want_pooled;
  for (int64_t row = 0; row < b.batch; ++row) {
    std::vector<int64_t> ids, types, positions, columns;
    int64_t counted = config.padding_id;  // of ids that are not padding, masked or not
    for (int64_t s = 0; s < b.seq; ++s) {
      counted += b.ids[row * b.seq + s] != config.padding_id;
      if (!b.mask[row * b.seq + s]) continue;
      positions.push_back(config.counts_tokens() ? counted : s);
      ids.push_back(b.ids[row * b.seq + s]);
      types.push_back(b.types[row * b.seq + s]);
      columns.push_back(s);
    }
    const std::vector<Row> sequence = reference.forward(ids, types, positions, columns);
    want.insert(want.end(), sequence.begin(), sequence.end());
    want_first.push_back(sequence.empty() ? Row(config.hidden, 0.0) : sequence[0]);
    want_last.push_back(sequence.empty() ? Row(config.hidden, 0.0) : sequence.back());
    want_pooled.push_back(sequence.empty() ? Row(config.hidden, 0.0) : reference.pool(sequence[0]));
  }
  for (const int64_t token : some_tokens(o.info.tokens)) want_named.push_back(want[token]);
  for (const auto& [what, rows, expected] :
       {std::tuple("last hidden state", &got.hidden, &want),
        std::tuple("that of first tokens", &got.first, &want_first),
        std::tuple("that of last tokens", &got.last, &want_last), std::tuple("that of some", &got.named, &want_named),
        std::tuple("pooled output", &got.pooled, &want_pooled)}) {
    const double d = difference(*rows, *expected);
    expect(d <= most, std::string(what) + " differs by " + std::to_string(d));
  }
}

void forward_matches(int hidden, int heads, const std::string& activation, AttentionPath path) {
  forward_matches(make_config(hidden, heads, activation), path);
}

// What no checkpoint says today and the layers can do: heads of another width than hidden, few of keys and values, a
// window or a causal mask in some layers, another scale, no biases, norms that are absent or have no beta.
void other_layers_match(NormPlace place, AttentionPath path) {
  ModelConfig config = make_config(32, 2, "gelu", place, 3);
  for (LayerConfig& layer : config.layers) {
    layer.attention.heads = {.count = 6, .kv = 2, .size = 8, .scale = 0.2f};
    layer.attention.qkv_bias = layer.attention.out_bias = layer.ffn.up_bias = layer.ffn.down_bias = false;
    layer.attention_norm.bias = layer.ffn_norm.bias = false;
  }
  config.layers[0].attention_norm.kind = NormKind::none;
  config.layers[0].attention.window = {.right = 0};
  config.layers[1].attention.window = {.left = 2, .right = 1};
  config.layers[2].ffn_norm.kind = NormKind::none;
  config.layers[2].attention.window = {.left = 3};  // a last row is then no first one
  config.final_norm.bias = false;
  forward_matches(config, path);
}

// Norms of blocks' results in a model whose layers have their norms in different places, one of them absent.
void sandwiched_norms_match(NormPlace first, NormPlace second, AttentionPath path) {
  ModelConfig config = make_config(32, 2, "gelu");
  const NormConfig norm = config.layers[0].attention_norm;
  config.final_norm = norm;
  for (LayerConfig& layer : config.layers) layer.attention_result_norm = layer.ffn_result_norm = norm;
  config.layers[0].norm_place = first;
  config.layers[1].norm_place = second;
  config.layers[1].attention_result_norm.kind = NormKind::none;
  config.layers[1].ffn_norm.kind = first == second ? NormKind::none : NormKind::layer;
  forward_matches(config, path);
}

// Heads of queries and keys that are normed, turned, or both, each layer in its own way: by columns, wherever the
// model's positions come from.
void turned_heads_match(PositionKind positions, AttentionPath path) {
  ModelConfig config = make_config(32, 2, "gelu", NormPlace::post, 4);
  config.positions = positions;
  config.padding_id = 1;
  const NormConfig layer{.kind = NormKind::layer, .bias = false, .eps = 1e-6};
  const NormConfig rms{.kind = NormKind::rms, .bias = false, .eps = 1e-6, .offset = 1};
  std::vector<Rotary> rotary(2);
  rotary[0] = {.dims = 8, .frequencies = {1, 0.4, 0.1, 0.01}};
  rotary[1] = {.dims = 6, .frequencies = {0.7, 0.3, 0.2}, .amplitude = 1.3, .interleaved = true};
  for (LayerConfig& l : config.layers) l.attention.heads = {.count = 6, .kv = 2, .size = 8, .scale = 0.2f};
  config.layers[0].attention.rotary = config.layers[3].attention.rotary = rotary[0];
  config.layers[1].attention.rotary = rotary[1];
  config.layers[1].attention.qk_norm = rms;
  config.layers[2].attention.qk_norm = layer;
  config.layers[3].attention.qkv_bias = false;
  forward_matches(config, path);
}

// Gates in some layers, with biases and without.
void gates_match(const std::string& activation, AttentionPath path) {
  ModelConfig config = make_config(32, 2, activation, NormPlace::pre, 3);
  config.layers[0].ffn.gated = config.layers[1].ffn.gated = true;
  config.layers[1].ffn.inter = 35;
  config.layers[1].ffn.up_bias = config.layers[1].ffn.down_bias = false;
  forward_matches(config, path);
}

// RMSNorm before blocks (Llama), and of their results too, with an offset and scaled embeddings (Gemma).
void rms_norms_match(bool sandwich, AttentionPath path) {
  ModelConfig config = make_config(32, 2, "silu", NormPlace::pre);
  const NormConfig rms{.kind = NormKind::rms,
                       .bias = false,
                       .eps = 1e-6,
                       .offset = sandwich ? 1.0 : 0.0,
                       .rounding = sandwich ? NormRounding::once : NormRounding::before_gamma};
  config.final_norm = config.embedding_norm = rms;
  config.embedding_norm.bias = true;
  for (LayerConfig& layer : config.layers) layer.attention_norm = layer.ffn_norm = rms;
  if (sandwich) {
    config.embedding_scale = std::sqrt(32.0);
    config.embedding_norm.kind = NormKind::none;
    for (LayerConfig& layer : config.layers) layer.attention_result_norm = layer.ffn_result_norm = rms;
  }
  forward_matches(config, path);
}

// Matrices with scales, of which products round the other operand too.
void stored_formats_match(const Format& format, AttentionPath path) {
  if (!kernel_for(format)) {
    std::printf("  SKIPPED %s: %s has no instructions for it\n", std::string(format.name).c_str(),
                std::string(cpu_isa()).c_str());
    return;
  }
  ModelConfig config = make_config(64, 2, "gelu");
  for (LayerConfig& layer : config.layers) {
    layer.ffn.inter = 128;
    layer.attention.qkv_type = layer.attention.out_type = layer.ffn.up_type = layer.ffn.down_type = &format;
  }
  config.layers[1].ffn.gated = true;
  forward_matches(config, path, 0.3);
}

// A matrix in a type that no product reads, or with scales, is refused where the model is made.
void unread_matrices_are_errors() {
  const ModelConfig config = make_config(32, 2, "gelu");
  const Tensors tensors = random_weights(config);
  const float scale = 1;
  const auto refused = [&](const auto& spoil, const std::string& words) {
    Weights<float> weights = bind_tensors(config, tensors);
    spoil(weights.layers[1].down);
    std::string said;
    try {
      const Encoder<Cpu, float> encoder({}, config, weights);
    } catch (const Error& error) {
      said = error.what();
    }
    expect(said.find(words) != std::string::npos, "expected '" + words + "', got '" + said + "'");
  };
  refused([](Linear<float>& l) { l.weight.format = &formats::int8; }, "stored as int8");
  refused([](Linear<float>& l) { l.weight.format = &formats::e4m3; }, "stored as e4m3");
  refused([&](Linear<float>& l) { l.weight.scale = &scale; }, "scales of a matrix");
  refused([&](Linear<float>& l) { l.input = &scale; }, "scales of a matrix");
}

// First rows go through the last layer together, empty ones too: buffers must have room for them.
void more_sequences_than_tokens(NormPlace place) {
  const ModelConfig config = make_config(32, 2, "gelu", place);
  const Tensors tensors = random_weights(config);
  const Encoder<Cpu, float> encoder({}, config, bind_tensors(config, tensors));
  PaddedIds b{200, 2, std::vector<int64_t>(400, 5), std::vector<int64_t>(400, 1), std::vector<uint8_t>(400, 0)};
  b.mask[14] = b.mask[15] = b.mask[398] = 1;
  b.ids[15] = 9;
  const Output got = run_core(encoder, b, offsets(b.mask, b.batch, b.seq));
  std::vector<Row> want(200, Row(config.hidden, 0.0));
  for (int64_t j = 0; j < config.hidden; ++j) {
    want[7][j] = got.hidden[j];
    want[199][j] = got.hidden[2 * config.hidden + j];
  }
  const double f = difference(got.first, want);
  expect(f <= 1e-6, "last hidden state of first tokens differs by " + std::to_string(f));
  for (int64_t j = 0; j < config.hidden; ++j) want[7][j] = got.hidden[config.hidden + j];
  const double l = difference(got.last, want);
  expect(l <= 1e-6, "last hidden state of last tokens differs by " + std::to_string(l));
}

void what_forward_cannot_run_is_an_error() {
  const ModelConfig config = make_config(32, 2, "gelu");
  const Tensors tensors = random_weights(config);
  const Encoder<Cpu, float> encoder({}, config, bind_tensors(config, tensors));
  const std::vector<int64_t> ids = {1, 2, 3};
  const std::vector<int32_t> cu = {0, 3}, positions = {0, 1, 2};
  Context<Cpu> context{&cblas_products()};
  const Batch good{
      .sequences = Sequences::of_tokens(cu.data(), 1, 3, 3), .ids = ids.data(), .positions = positions.data()};
  std::vector<float> hidden(rows_with_slack<Cpu>(3) * config.hidden);
  const auto refused = [&](const Batch& batch, size_t share, const std::string& words) {
    const auto plan = encoder.plan(context, batch);
    std::vector<char> memory(plan.bytes / share);
    std::string said;
    try {
      encoder.forward(context, batch, plan, Workspace(memory.data(), memory.size()), hidden.data());
    } catch (const Error& error) {
      said = error.what();
    }
    expect(said.find(words) != std::string::npos, "expected '" + words + "', got '" + said + "'");
  };
  refused(good, 2, "too small");
  Batch bad = good;
  bad.positions = nullptr;
  refused(bad, 1, "lacks its positions");
  bad = good;
  bad.cache = reinterpret_cast<KvCache*>(hidden.data());
  refused(bad, 1, "keys of earlier tokens");
}

// Before anything is computed.
void a_cache_has_rows_that_a_gpu_reads() {
  ModelConfig config = make_config(30, 2, "gelu");
  for (LayerConfig& layer : config.layers) layer.attention.window.right = 0;
  const int64_t bytes = config.layers[0].attention.heads.kv_width() * bytes_of(DType::fp16);
  const auto make = [&](int64_t row_bytes) {
    return KvCache(config, AttentionPath::fused, DType::fp16, row_bytes, 1, config.max_seq());
  };
  expect(bytes % kCudaRowBytes != 0, "rows of " + std::to_string(bytes) + " bytes are no example");
  expect(make(1).bytes() > 0, "rows that begin anywhere");
  std::string said;
  try {
    make(kCudaRowBytes);
  } catch (const Error& error) {
    said = error.what();
  }
  expect(said.find("bytes, no multiple of 16") != std::string::npos, "a cache said '" + said + "'");
}

// Each row of the table: its name, the bytes of a matrix, sizes that products read, and what the other operand becomes.
void formats_are_rows_of_a_table() {
  constexpr int64_t n = 48, k = 192;
  const std::map<std::string_view, int64_t> bytes = {
      {"fp32", n * k * 4},    {"fp16", n * k * 2}, {"bf16", n * k * 2},    {"e4m3", n * k},
      {"e4m3_tensor", n * k}, {"int8", n * k},     {"byte_rows", n * 256}, {"q8_0", n * k + n * k / 32 * 2}};
  const std::map<std::string_view, std::string_view> others = {{"e4m3", "e4m3_tensor"}, {"int8", "byte_rows"}};
  const std::map<std::string_view, std::string> sizes = {
      {"e4m3", "multiples of 16"}, {"e4m3_tensor", "multiples of 16"}, {"q8_0", "multiples of 8 and 64"}};
  expect(all_formats().size() == bytes.size(), "another number of formats");
  for (const Format* format : all_formats()) {
    const std::string name(format->name);
    expect(&parse_format(name) == format, name + " is found by its name");
    expect(format->bytes(n, k) == bytes.at(name), name + " takes " + std::to_string(format->bytes(n, k)) + " bytes");
    if (const auto other = others.find(name); other != others.end())
      expect(format->other && format->other->name == other->second, name + ": what the other operand becomes");
    else
      expect(!format->other || format->other == format, name + ": the other operand stays");
    expect(format->other_size(n, k, false).empty(), name + " has products of [48, 192]");
    const auto size = sizes.find(name);
    expect(format->other_size(n + 1, k, false) == (size == sizes.end() ? "" : size->second), name + ": sizes");
    if (format->block == kNoScales) expect(&plain_format(parse_dtype(name)) == format, name + " is plain");
  }
  expect(formats::int8.other_size(1, 15, false) == "16 to 65793 columns", "int8: columns");
  expect(formats::int8.other_size(12, 64, true) == "multiples of 8", "int8: rows on a GPU");
  expect(formats::int8.other_size(8, 24, true) == "32 to 65793 columns", "int8: columns on a GPU");
  expect(formats::byte_rows.bytes(3, 57) == 3 * byte_row_bytes(57), "byte rows");
}

// Without a GPU: what its capability, that of the code and FTBERT_MAX_GPU come to.
void a_gpu_is_held_to_its_code() {
  struct Case {
    int device, code;
    const char* wish;
    int counts;
    std::string why;
  };
  const std::string for_80 = "the code of this build that runs here is for 8.0";
  const Case cases[] = {{90, 90, "", 90, ""},
                        {90, 90, "90", 90, ""},
                        {90, 80, "", 80, for_80},
                        {90, 80, "80", 80, for_80 + ", as FTBERT_MAX_GPU=80 asks"},
                        {90, 80, "89", 80, for_80 + ", as FTBERT_MAX_GPU=89 asks"},
                        {75, 75, "80", 75, ""},
                        {86, 80, "", 80, for_80},
                        {120, 90, "", 90, "the code of this build that runs here is for 9.0"}};
  for (const Case& c : cases) {
    const GpuLevel level = gpu_level(c.device, c.code, c.wish);
    expect(level.capability == c.counts && level.why == c.why,
           std::to_string(c.device) + " with code for " + std::to_string(c.code) + " and '" + c.wish + "' counts as " +
               std::to_string(level.capability) + ", " + level.why);
  }
  const auto refused = [](int code, const char* wish, const std::string& words) {
    try {
      gpu_level(90, code, wish);
      expect(false, std::string(wish) + " was taken");
    } catch (const Error& error) {
      expect(std::string(error.what()) == words, error.what());
    }
  };
  for (const char* wish : {"91", "8.0", "80 ", "hopper"})
    refused(80, wish, std::string("FTBERT_MAX_GPU: expected one of 75, 80, 86, 89, 90, got ") + wish);
  refused(
      90, "80",
      "FTBERT_MAX_GPU=80: on this GPU of compute capability 9.0 the code for 9.0 of this build runs, in which kernels "
      "for lesser GPUs are left out; build with FTBERT_CUDA_ARCHS=80-virtual");

  const Gpu hopper{.capability = 90,
                   .sm_count = 132,
                   .device_capability = 90,
                   .warpgroups = 1,
                   .shared_bytes = 227 << 10,
                   .shared_bytes_of_sm = 228 << 10,
                   .clock_khz = 1980000};
  const std::map<int, int> kilobytes = {{75, 64}, {80, 163}, {86, 99}, {89, 99}, {90, 227}};
  for (const auto& [capability, block] : kilobytes) {
    const Gpu held = held_to(hopper, capability);
    expect(held.capability == capability && held.warpgroups == (capability == 90) && held.sm_count == 132 &&
               held.shared_bytes == block << 10 && held.clock_khz == hopper.clock_khz,
           "held to " + std::to_string(capability));
  }
  expect(capability_text(hopper) == "9.0" && capability_text(held_to(hopper, 86)) == "9.0 (held to 8.6)", "in words");
  const auto of_bf16 = [&](int capability) {
    check_format_exists(DeviceKind::cuda, held_to(hopper, capability), DType::bf16, formats::bf16);
  };
  of_bf16(80);
  try {
    of_bf16(75);
    expect(false, "bf16 on 7.5");
  } catch (const Error& error) {
    expect(
        std::string(error.what()) ==
            "no product on cuda multiplies bf16 by a matrix stored as bf16 on a GPU of compute capability 9.0 (held to "
            "7.5); expected 8.0 or above: load the model in fp16 or fp32",
        error.what());
  }
}

// Each kernel of the CPU computes a product that it supports, and none with a part that it does not read.
void unread_parts_are_refused() {
  const auto asks = [](Product product, auto change) {
    change(product);
    return product;
  };
  for (const CpuKernel* kernel : cpu_kernels())
    for (const Format* format : all_formats()) {
      const DType a = format->other ? format->other->numbers : DType::fp32;
      const Product plain{.m = 1, .n = 64, .k = 64, .a = a, .b = format};
      if (!kernel->can(plain)) continue;
      const std::string name(kernel->name);
      expect(kernel->can(asks(plain, [](Product& p) { p.epilogue.bias = true; })) == kernel->reads.has(Part::bias),
             name + ": a bias");
      for (const Product& more :
           {asks(plain, [](Product& p) { p.before = Before::norm_rows; }),
            asks(plain, [](Product& p) { p.epilogue.residual = true; }),
            asks(plain, [](Product& p) { p.epilogue.heads.size = 64; }),
            asks(plain, [](Product& p) { p.epilogue.after = After::norm; }),
            asks(plain, [](Product& p) { p.batch = 2; }), asks(plain, [](Product& p) { p.b_transposed = false; })})
        expect(!kernel->can(more), name + " computes a product with a part that it does not read");
    }
}

// "1" where cores are busy, behind each of the spans of 1/16 s in which a team's threads wait for a core for so large a
// share of their time, in so many turns.
void crowding_is_seen() {
  struct Span {
    std::vector<double> shares;
    double turns = 4;
  };
  const auto states = [](const std::vector<Span>& spans, bool crowded) {
    Crowding cores(crowded);
    std::string found;
    double now = 0;
    for (const Span& span : spans) {
      now += 0.0625;
      std::vector<ThreadTime> team;
      for (const double share : span.shares) team.push_back({0.1 * (1 - share), 0.1 * share, span.turns});
      cores.observe(now, team);
      found += cores.crowded() ? "1" : "0";
    }
    return found;
  };
  const Span busy{{0.6, 0.6}}, used{{0.2, 0.2}}, free{{0.02, 0.02}}, woken{{0.4, 0.4}, 1000};
  const Span one{{0.5, 0, 0, 0, 0, 0, 0, 0}}, two{{0.5, 0.5, 0, 0, 0, 0, 0, 0}};
  expect(states({busy, used, busy, busy, used}, false) == "00011", "waiting twice in a row is crowding until it ends");
  expect(states({woken, woken, woken}, false) == "000", "being woken is no waiting");
  expect(states({one, one, two, two}, false) == "0001", "a fourth of the team");
  expect(states({free, free, free, free, free, free}, true) == "111100", "a quarter of a second of free cores");
  expect(states({woken, woken, woken, woken, woken}, true) == "11110", "threads that sleep are woken");
  expect(states({free, free, free, used, free, free, free, free}, true) == "11111111", "free without a break");
  std::vector<Span> spans(5, free);
  spans.insert(spans.end(), 2, busy);
  spans.insert(spans.end(), 9, free);
  expect(states(spans, true) == "1111001111111110", "twice as long after a try that failed");
}

// Of each size one tile and more, whole and not, in one cut of the depth and several.
void panel_product_matches() {
  std::mt19937 engine(0);
  std::normal_distribution<float> normal;
  const auto random = [&](int64_t count) {
    std::vector<float> values(count);
    for (float& value : values) value = normal(engine);
    return values;
  };
  for (const int64_t m : {0, 1, 5, 15, 29, 400})
    for (const int64_t n : {1, 16, 33, 100})
      for (const int64_t k : {1, 64, 385, 800})
        for (const Activation activation : {Activation::none, Activation::relu}) {
          const std::vector<float> a = random(m * k), weight = random(n * k), bias = random(n);
          const WeightLayout& layout = *float_panels.layout;
          std::vector<float> panels(layout.bytes(n, k) / sizeof(float), NAN), unpacked(n * k), out(m * n + 1, NAN);
          layout.pack(weight.data(), nullptr, n, k, panels.data());
          layout.unpack(panels.data(), n, k, unpacked.data(), nullptr);
          FTBERT_CHECK(weight == unpacked, n, " x ", k, ": the weight does not come back from its panels");
          const bool biased = activation != Activation::none;
          Product product{.m = m, .n = n, .k = k, .epilogue = {.bias = biased, .activation = activation}};
          CpuData data{
              .a = Operand::of(a.data()), .b = panels.data(), .bias = biased ? bias.data() : nullptr, .c = out.data()};
          Context<Cpu> context;
          float_panels.run(context, product, data);
          if (n % 2 == 0) {
            std::vector<float> sums(m * n + 1, NAN), gated(m * n / 2 + 1, NAN);
            product.epilogue.gate = Gate::pairs;
            data.c = gated.data(), data.sums = sums.data();
            float_panels.run(context, product, data);
            product.epilogue = {.bias = biased};
            data.c = sums.data();
            float_panels.run(context, product, data);
            for (int64_t i = 0; i < m * n / 2; ++i) {
              const float want = (biased ? std::max(sums[2 * i], 0.0f) : sums[2 * i]) * sums[2 * i + 1];
              FTBERT_CHECK(gated[i] == want, m, " x ", n, " x ", k, ", gated: expected ", want, " at ", i, ", got ",
                           gated[i]);
            }
            FTBERT_CHECK(std::isnan(gated[m * n / 2]), m, " x ", n, " x ", k, ": a gate wrote behind its result");
          }
          for (int64_t i = 0; i < m * n; ++i) {
            double want = biased ? bias[i % n] : 0, size = 1;
            for (int64_t d = 0; d < k; ++d) {
              const double term = static_cast<double>(a[i / n * k + d]) * weight[i % n * k + d];
              want += term;
              size += std::abs(term);
            }
            if (biased) want = std::max(want, 0.0);
            FTBERT_CHECK(std::abs(out[i] - want) <= 1e-6 * size, m, " x ", n, " x ", k, ": expected ", want, " at ", i,
                         ", got ", out[i]);
          }
          FTBERT_CHECK(std::isnan(out[m * n]), m, " x ", n, " x ", k, ": wrote behind its result");
        }
}

// Exact sums, which floats hold, of sizes that fill neither panels nor tiles; the weight comes back from its panels.
void int8_product_matches() {
  if (int8_panels.lacks()) {
    std::printf("  SKIPPED int8 products: %s has none\n", std::string(cpu_isa()).c_str());
    return;
  }
  for (const int64_t m : {1, 33, 300})
    for (const int64_t n : {1, 34, 96})
      for (const int64_t k : {17, 64, 1100}) {
        const int64_t stride = byte_row_bytes(k);
        std::vector<int8_t> weight(n * k), unpacked(n * k);
        for (size_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<int8_t>(i * 37 % 11 - 5);
        std::vector<uint8_t> a(m * stride), panels(int8_panels.layout->bytes(n, k));
        const float scale = 1;
        for (int64_t i = 0; i < m; ++i) {
          const int32_t zero = static_cast<int32_t>(i * 50 % 256);
          for (int64_t d = 0; d < k; ++d) a[i * stride + d] = static_cast<uint8_t>((i + d) * 91 % 256);
          std::memcpy(&a[(i + 1) * stride - 8], &scale, 4);
          std::memcpy(&a[(i + 1) * stride - 4], &zero, 4);
        }
        const std::vector<float> scales(n, 1.0f);
        std::vector<float> out(m * n + 1, NAN);
        int8_panels.layout->pack(weight.data(), nullptr, n, k, panels.data());
        int8_panels.layout->unpack(panels.data(), n, k, unpacked.data(), nullptr);
        FTBERT_CHECK(weight == unpacked, n, " x ", k, ": the weight does not come back from its panels");
        Context<Cpu> context;
        int8_panels.run(
            context, {.m = m, .n = n, .k = k},
            {.a = {a.data(), &formats::byte_rows}, .b = panels.data(), .b_scale = scales.data(), .c = out.data()});
        for (int64_t i = 0; i < m * n; ++i) {
          int64_t want = 0;
          for (int64_t d = 0; d < k; ++d) want += (a[i / n * stride + d] - i / n * 50 % 256) * weight[i % n * k + d];
          FTBERT_CHECK(out[i] == static_cast<float>(want), m, " x ", n, " x ", k, ": expected ", want, " at ", i,
                       ", got ", out[i]);
        }
        FTBERT_CHECK(std::isnan(out[m * n]), m, " x ", n, " x ", k, ": wrote behind its result");
      }
}

}  // namespace
}  // namespace ftbert

int main() {
  using namespace ftbert;
  std::vector<std::pair<std::string, std::function<void()>>> tests = {
      {"more sequences than tokens, post", [] { more_sequences_than_tokens(NormPlace::post); }},
      {"more sequences than tokens, pre", [] { more_sequences_than_tokens(NormPlace::pre); }},
      {"what forward cannot run is an error", what_forward_cannot_run_is_an_error},
      {"unread matrices are errors", unread_matrices_are_errors},
      {"a cache has rows that a GPU reads", a_cache_has_rows_that_a_gpu_reads},
      {"crowding is seen", crowding_is_seen},
      {"formats are rows of a table", formats_are_rows_of_a_table},
      {"a GPU is held to its code", a_gpu_is_held_to_its_code},
      {"unread parts are refused", unread_parts_are_refused},
      {"panel product matches", panel_product_matches},
      {"int8 product matches", int8_product_matches},
  };
  for (const auto& [name, path] :
       {std::pair{"fused", AttentionPath::fused}, std::pair{"general", AttentionPath::general}}) {
    for (const char* activation : {"gelu", "gelu_new", "relu", "silu"})
      tests.emplace_back(std::string("forward matches, ") + name + ", " + activation,
                         [=] { forward_matches(32, 2, activation, path); });
    for (const char* activation : {"gelu", "gelu_new", "relu", "silu"})
      tests.emplace_back(std::string("gates match, ") + name + ", " + activation,
                         [=] { gates_match(activation, path); });
    for (const NormPlace place : {NormPlace::post, NormPlace::pre})
      tests.emplace_back(std::string("other layers match, ") + name + (place == NormPlace::pre ? ", pre" : ", post"),
                         [=] { other_layers_match(place, path); });
    for (const PositionKind positions : {PositionKind::none, PositionKind::absolute, PositionKind::from_padding})
      tests.emplace_back(std::string("turned heads match, ") + name, [=] { turned_heads_match(positions, path); });
    for (const NormPlace first : {NormPlace::post, NormPlace::pre})
      for (const NormPlace second : {NormPlace::post, NormPlace::pre})
        tests.emplace_back(std::string("sandwiched norms match, ") + name,
                           [=] { sandwiched_norms_match(first, second, path); });
    for (const Format* format : {&formats::int8, &formats::q8_0})
      tests.emplace_back(std::string(format->name) + " matches, " + name, [=] { stored_formats_match(*format, path); });
    for (const bool sandwich : {false, true})
      tests.emplace_back(std::string("RMSNorms match, ") + name, [=] { rms_norms_match(sandwich, path); });
    tests.emplace_back(std::string("forward matches, ") + name + ", 2 heads of 64",
                       [=] { forward_matches(128, 2, "gelu", path); });
  }
  // An odd head size has no fused kernel to be forced onto.
  tests.emplace_back("forward matches, general, 3 heads of 7",
                     [] { forward_matches(21, 3, "gelu", AttentionPath::general); });

  int failed = 0;
  std::printf("matrix products: %s; instructions: %s\n", cblas_name().c_str(), std::string(cpu_isa()).c_str());
  for (const auto& [name, test] : tests) {
    try {
      test();
      std::printf("  ok      %s\n", name.c_str());
    } catch (const std::exception& error) {
      ++failed;
      std::printf("  FAILED  %s: %s\n", name.c_str(), error.what());
    }
  }
  std::printf("%d passed, %d failed\n", static_cast<int>(tests.size()) - failed, failed);
  return failed != 0;
}
