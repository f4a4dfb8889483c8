// A tiny encoder on the core alone: a config, weights by name, two sentences of different length, one forward pass.
#include <cstdio>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/check.h"
#include "encoder.h"
#include "gemm/cpu/kernel.h"
#include "gemm/gemm.h"
#include "kernels/kernels.h"
#include "layers/positions.h"

int main() {
  using namespace ftbert;
  try {
    // `encoder` in the config.json of a checkpoint.
    const ModelConfig config = ModelConfig::parse(R"({
      "vocab": 100, "hidden": 64, "embedding": 64, "token_types": 2, "positions": {"kind": "absolute", "rows": 128},
      "embedding_norm": {"eps": 1e-12},
      "layer": {"attention": {"heads": 2, "head_size": 32}, "attention_norm": {"eps": 1e-12},
                "ffn": {"inter": 256, "activation": "gelu"}, "ffn_norm": {"eps": 1e-12}},
      "layers": [{"repeat": 2}]})");

    // Weights by name. A real program would read them from model.safetensors, where they have these names.
    std::map<std::string, std::vector<float>> tensors;
    std::mt19937 engine(0);
    std::normal_distribution<float> normal(0, 0.1f);
    for (const WeightSpec& spec : weight_specs(config)) {
      int64_t count = 1;
      for (const int64_t size : spec.shape) count *= size;
      std::vector<float>& values = tensors[spec.name];
      for (int64_t i = 0; i < count; ++i) values.push_back(normal(engine));
    }
    const Weights<float> weights = bind_weights<float>(config, [&](const std::string& name) {
      return Matrix{.data = tensors.at(name).data(), .kernel = &cblas_kernel};
    });
    Context<Cpu> context{&cblas_products()};
    const Encoder<Cpu, float> encoder(context, config, weights);

    // Two sentences, packed one behind the other: nothing is computed for padding because there is none.
    const std::vector<int64_t> input_ids = {2, 17, 25, 3, 2, 48, 31, 77, 65, 3};
    const std::vector<int32_t> cu_seqlens = {0, 4, 10};
    Batch batch{.sequences = Sequences::of_tokens(cu_seqlens.data(), /*count=*/2, /*max_seqlen=*/6, /*rows=*/10),
                .ids = input_ids.data()};
    std::vector<int32_t> positions(batch.tokens());
    find_positions(context, config, batch, batch.tokens(), {.ids = positions.data()});
    batch.positions = positions.data();

    // The caller owns all memory; the core only points into it.
    const auto plan = encoder.plan(context, batch);
    std::vector<char> workspace(plan.bytes);
    std::vector<float> hidden(rows_with_slack<Cpu>(batch.output_rows()) * config.hidden);  // [tokens, hidden]
    encoder.forward(context, batch, plan, Workspace(workspace.data(), workspace.size()), hidden.data());
    std::vector<float> vectors(2 * config.hidden);  // [sequences, hidden]
    pooling<Cpu, float>(context, hidden.data(), cu_seqlens.data(), /*batch=*/2, config.hidden, PoolingMode::mean,
                        /*normalize=*/true, vectors.data());

    double cosine = 0;
    for (int64_t i = 0; i < config.hidden; ++i) cosine += vectors[i] * vectors[config.hidden + i];
    std::printf("matrix products: %s\n", cblas_name().c_str());
    std::printf("attention: %s\n", encoder.attention().path == AttentionPath::fused ? "fused" : "general");
    std::printf("cosine of the two sentences: %.6f\n", cosine);
  } catch (const Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
