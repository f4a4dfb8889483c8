// The choice among the instruction sets that the library was compiled for, and the kernels that go by it.
#include "kernels/isa.h"

#include <cstdlib>
#include <iterator>
#include <string>

#include "core/check.h"

#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ftbert {

// Weak: a build without a set has nullptr for its address.
#define FTBERT_DECLARE(isa)                                    \
  namespace isa {                                              \
  [[gnu::weak]] extern const IsaKernels kernels, tile_kernels; \
  }
#ifdef __x86_64__
FTBERT_DECLARE(avx2)
FTBERT_DECLARE(avx2_vnni)
FTBERT_DECLARE(avx512)
FTBERT_DECLARE(avx512_vnni)
FTBERT_DECLARE(avx512_bf16)
#else
FTBERT_DECLARE(baseline)
#endif
#undef FTBERT_DECLARE

namespace {

struct Level {
  std::string_view name;
  const IsaKernels* kernels;
  bool (*here)();  // whether this CPU has it
};

#ifdef __x86_64__
// The builtin also asks whether the system saves the registers.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2");
}
// Of what has_avx2 asks for: "AVX2, FMA".
std::string lacking_of_x86_64_v3() {
  std::string names;
  const auto add = [&](bool here, const char* name) {
    if (!here) names += (names.empty() ? "" : ", ") + std::string(name);
  };
  add(__builtin_cpu_supports("avx2"), "AVX2");
  add(__builtin_cpu_supports("fma"), "FMA");
  add(__builtin_cpu_supports("bmi"), "BMI1");
  add(__builtin_cpu_supports("bmi2"), "BMI2");
  return names;
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx2_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }

// Linux gives a process the tiles' registers when it asks for them; a sandbox may refuse.
bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!has_avx512_bf16() || !&avx512_bf16::tile_kernels || !avx512_bf16::tile_kernels.tiles) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if (!(d >> 22 & 1) || !(d >> 24 & 1) || !(d >> 25 & 1)) return false;  // bf16, tiles, int8
#ifdef __linux__
  constexpr long kAsk = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
#else
  return false;
#endif
}

// The higher, the better. No level but the first is on all CPUs that have a higher one.
constexpr Level kLevels[] = {{"avx2", &avx2::kernels, has_avx2},
                             {"avx2_vnni", &avx2_vnni::kernels, has_avx2_vnni},
                             {"avx512", &avx512::kernels, has_avx512},
                             {"avx512_vnni", &avx512_vnni::kernels, has_avx512_vnni},
                             {"avx512_bf16", &avx512_bf16::kernels, has_avx512_bf16},
                             {"amx", &avx512_bf16::tile_kernels, has_amx}};
#else
constexpr Level kLevels[] = {{"baseline", &baseline::kernels, [] { return true; }}};
std::string lacking_of_x86_64_v3() { return ""; }
#endif

// Names joined, of levels that this build has.
std::string levels_of_build() {
  std::string names;
  for (const Level& level : kLevels)
    if (level.kernels) names += (names.empty() ? "" : ", ") + std::string(level.name);
  return names;
}

// The highest level of this CPU and this build up to the one that FTBERT_MAX_CPU_ISA names; nullptr on a CPU that has
// no level at all.
const Level* choose_level() {
  constexpr int kCount = static_cast<int>(std::size(kLevels));
  const char* wish = std::getenv("FTBERT_MAX_CPU_ISA");
  int most = kCount - 1;
  if (wish && *wish && kCount > 1) {
    std::string names;
    for (most = 0; most < kCount && kLevels[most].name != wish; ++most)
      names += (most ? ", " : "") + std::string(kLevels[most].name);
    if (most == kCount) throw Error("FTBERT_MAX_CPU_ISA: expected one of " + names + ", got " + wish);
  }
  std::string_view lacking;  // the best that this CPU could run
  for (; most >= 0; --most) {
    if (!kLevels[most].here()) continue;
    if (kLevels[most].kernels) return &kLevels[most];
    if (lacking.empty()) lacking = kLevels[most].name;
  }
  FTBERT_CHECK(lacking.empty(), "this build has CPU kernels for ", levels_of_build(), ", and ",
               wish && *wish ? "FTBERT_MAX_CPU_ISA asks for " : "this CPU needs ", lacking,
               " or less; build with FTBERT_CPU_ISAS=ALL (`make build FTBERT_CPU_ISAS=ALL`), or install a wheel");
  return nullptr;
}

const Level* chosen_level() {
  static const Level* chosen = choose_level();
  return chosen;
}

const Level& level() {
  const Level* chosen = chosen_level();
  FTBERT_CHECK(chosen, why_no_cpu_kernels());
  return *chosen;
}

}  // namespace

const IsaKernels& isa_kernels() { return *level().kernels; }
std::string_view cpu_isa() { return level().name; }

std::string why_no_cpu_kernels() {
  if (chosen_level()) return "";
  return "this CPU lacks " + lacking_of_x86_64_v3() +
         "; on the CPU ftbert needs x86-64-v3, as of Intel Haswell (2013) or AMD Zen (2017)";
}

std::string cpu_isas() { return levels_of_build(); }

template <>
DType attention_operand<Cpu, float>(const Format& weight) {
  const bool rounds = weight.other && weight.other->numbers != DType::fp32;  // the rows that it multiplies
  return rounds && isa_kernels().bf16 ? DType::bf16 : DType::fp32;
}

bool attention_by_tiles(int64_t head_size) {
  constexpr int64_t kTileColumns = 32;  // two tiles of 16 sums side by side
  return isa_kernels().tiles && head_size % kTileColumns == 0;
}

const char* attention_products(int64_t head_size) {
  return !isa_kernels().bf16 ? "fp32" : attention_by_tiles(head_size) ? "bf16, AMX tiles" : "bf16";
}

template <>
std::string why_no_fused_attention<Cpu, float>(const Context<Cpu>&, const Heads&, ScoreMembers set) {
  isa_kernels();  // the error of a CPU without kernels comes when a model is loaded
  const ScoreMembers unread = set.without(kCpuAttentionReads);
  return unread == ScoreMembers() ? "" : "has no kernel that reads the " + names_of(unread) + " of a score policy";
}

template <>
void add_bias_act<Cpu, float>(Context<Cpu>& context, float* x, const float* bias, Activation activation, int64_t rows,
                              int64_t cols, const Operand& out) {
  FTBERT_CHECK(!out, "add_bias_act on the CPU works in place alone");
  isa_kernels().add_bias_act(context, x, bias, activation, rows, cols, out);
}

template <>
void add_bias_gate<Cpu, float>(Context<Cpu>& context, const Operand& x, const float* bias, Activation activation,
                               int64_t rows, int64_t cols, const Operand& out) {
  for (const Operand* one : {&x, &out}) {  // or an error
    if (one->dtype() == DType::bf16)
      one->as<bfloat16_t>();
    else
      one->as<float>();
  }
  isa_kernels().add_bias_gate(context, x, bias, activation, rows, cols, out);
}

template <>
void add_bias_input_layernorm<Cpu, float>(Context<Cpu>& context, const float* x, const float* bias, const float* input,
                                          const Norm<float>& norm, int64_t rows, int64_t cols,
                                          const Output<float>& out) {
  Output<float> to = out;
  if (out.copy.scaled())
    out.copy.byte_rows();  // or an error
  else
    to = {.sum = out.sum, .normed = out.only_norm()};
  isa_kernels().add_bias_input_layernorm(context, x, bias, input, norm, rows, cols, to);
}

template <>
void add_position_products<Cpu, float>(Context<Cpu>& context, const Heads& heads, const float* q, const float* k,
                                       const Sequences& sequences, const PositionProducts<float>& positions,
                                       float* scores) {
  isa_kernels().add_position_products(context, heads, q, k, sequences, positions, scores);
}

template <>
void add_qkv_bias<Cpu, float>(Context<Cpu>& context, const Heads& heads, const float* qkv, const float* bias,
                              const Sequences& sequences, float* q, float* k, float* v) {
  isa_kernels().add_qkv_bias(context, heads, qkv, bias, sequences, q, k, v);
}

template <>
void argmax<Cpu, float>(Context<Cpu>& context, const float* logits, int64_t rows, int64_t cols, int64_t* ids) {
  isa_kernels().argmax(context, logits, rows, cols, ids);
}

template <>
Operand attention<Cpu, float>(Context<Cpu>&, const Heads& heads, const QueriesKeysValues& from,
                              const Sequences& sequences, const ScorePolicy<float>& policy,
                              const AttentionScratch& scratch, const Operand& out) {
  const Operand to = out.scaled() ? Operand::of(static_cast<const float*>(out.data)) : out;
  to.as<float>();  // or an error
  FTBERT_CHECK(from.dtype == DType::fp32 || (from.dtype == DType::bf16 && isa_kernels().bf16),
               "attention on this CPU reads fp32", isa_kernels().bf16 ? " or bf16" : "", ", got ",
               to_string(from.dtype));
  FTBERT_CHECK(from.dtype == DType::fp32 || !policy.set().has(ScoreMember::positions),
               "attention on the CPU reads fp32 where scores have products with positions");
  return isa_kernels().attention(heads, from, sequences, policy.read<kCpuAttentionReads>("attention"), scratch, to);
}

template <>
size_t attention_scratch_bytes<Cpu, float>(const Heads& heads, int64_t max_k, AttentionUse use,
                                           int64_t position_stride) {
  return isa_kernels().attention_scratch_bytes(heads, max_k, use, position_stride);
}

template <>
int64_t attention_arrivals<Cpu>() {
  return 0;
}

template <>
void embeddings_layernorm<Cpu, float>(Context<Cpu>& context, const EmbeddingTables<float>& tables,
                                      const int64_t* input_ids, const int64_t* token_type_ids, const int64_t* to_padded,
                                      const int32_t* positions, int64_t tokens, int64_t cols, float* out,
                                      const Operand& copy, const float* factors) {
  if (tables.word.format != &formats::int8) tables.word.as<float>();  // or an error
  if (copy) copy.byte_rows();
  isa_kernels().embeddings_layernorm(context, tables, input_ids, token_type_ids, to_padded, positions, tokens, cols,
                                     out, copy, factors);
}

template <>
void quantise<Cpu, float>(Context<Cpu>& context, const float* x, int64_t rows, int64_t cols, const Operand& out) {
  out.dtype() == DType::uint8 ? out.byte_rows() : out.scaled_e4m3();  // or an error
  isa_kernels().quantise(context, x, rows, cols, out);
}

template <>
void pooling<Cpu, float>(Context<Cpu>& context, const float* hidden, const int32_t* cu_seqlens, int64_t batch,
                         int64_t cols, PoolingMode mode, bool normalize, float* out) {
  isa_kernels().pooling(context, hidden, cu_seqlens, batch, cols, mode, normalize, out);
}

template <>
void rotary<Cpu, float>(Context<Cpu>& context, const Heads& heads, const HeadRules<float>& rules, int64_t rows,
                        const Operand& qkv, const CacheRows<float>& cache) {
  if (qkv.dtype() != DType::bf16 || cache) qkv.as<float>();  // or an error
  isa_kernels().rotary(context, heads, rules, rows, qkv, cache);
}

template <>
void softmax<Cpu, float>(Context<Cpu>&, const Heads& heads, const float* scores, const Sequences& sequences,
                         const ScorePolicy<float>& policy, float* probabilities) {
  isa_kernels().softmax(heads, scores, sequences, policy.read<kSoftmaxReads>("softmax"), probabilities);
}

template <>
void max_sim<Cpu>(Context<Cpu>&, const MaxSim& of, void* scratch, float* scores) {
  isa_kernels().max_sim(of, scratch, scores);
}

template <>
size_t max_sim_scratch_bytes<Cpu>(const MaxSim& of) {
  return isa_kernels().max_sim_scratch_bytes(of);
}

}  // namespace ftbert
