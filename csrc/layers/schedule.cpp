#include "layers/schedule.h"

#include <algorithm>

namespace ftbert {
namespace {

// On the CPU a layer runs over runs of sequences of about this many tokens, so that what a run makes stays in the
// last-level cache while the layer's weights are used again from there.
constexpr int64_t kRunTokens = 768;

// Threads with sequences of their own meet once a call, not at each kernel. Each has about so many tokens at least.
// (A product's last rows, which are not read, may be rows that another thread is writing.)
constexpr int64_t kLeastTokensAlone = 128;

// The sequences from `first` to before `last`, greedily, in runs of up to `most` tokens; one sequence may be longer.
std::vector<Run> make_runs(const int32_t* cu_seqlens, int64_t first, int64_t last, int64_t most) {
  std::vector<Run> runs;
  int64_t begin = first;
  for (int64_t b = first; b < last; ++b) {
    const int64_t start = cu_seqlens[begin], end = cu_seqlens[b + 1];
    if (end - start > most && b > begin) {
      const int64_t cut = cu_seqlens[b];
      if (cut > start) runs.push_back({begin, b - begin, start, cut - start});
      begin = b;
    }
  }
  const int64_t start = cu_seqlens[begin], end = cu_seqlens[last];
  if (end > start) runs.push_back({begin, last - begin, start, end - start});
  return runs;
}

// Where to cut the sequences so that each of `count` threads has about as many tokens, [count + 1]; empty where a
// thread would have a tenth more than its share, or all too few for products.
std::vector<int64_t> equal_cuts(const Sequences& sequences, int64_t count) {
  if (count < 2 || sequences.rows < count * kLeastTokensAlone) return {};
  const int32_t* const cu_seqlens = sequences.cu_q;
  std::vector<int64_t> cuts{0};
  for (int64_t i = 1; i <= count; ++i) {
    const auto aim = static_cast<int32_t>(sequences.rows * i / count);
    int64_t at = std::lower_bound(cu_seqlens, cu_seqlens + sequences.count + 1, aim) - cu_seqlens;
    if (at > 0 && aim - cu_seqlens[at - 1] < cu_seqlens[at] - aim) --at;
    if (i == count) at = sequences.count;
    if (10 * count * (cu_seqlens[at] - cu_seqlens[cuts.back()]) > 11 * sequences.rows) return {};
    cuts.push_back(at);
  }
  return cuts;
}

}  // namespace

int64_t Schedule::most_tokens(const std::vector<Run>& runs) {
  int64_t most = 0;
  for (const Run& run : runs) most = std::max(most, run.tokens);
  return most;
}

Schedule make_schedule(const Context<Cpu>& context, const Sequences& sequences, bool may_work_alone) {
  Schedule schedule;
  schedule.together = make_runs(sequences.cu_q, 0, sequences.count, kRunTokens);
  const int64_t threads = may_work_alone ? context.products->threads() : 1;
  const std::vector<int64_t> cuts = equal_cuts(sequences, threads);
  for (size_t i = 1; i < cuts.size(); ++i)
    schedule.alone.push_back(
        make_runs(sequences.cu_q, cuts[i - 1], cuts[i], std::max(kRunTokens / threads, kLeastTokensAlone)));
  return schedule;
}

Schedule make_schedule(const Context<Cuda>&, const Sequences& sequences, bool) {
  return {{{0, sequences.count, 0, sequences.rows}}, {}};
}

void each_alone(Context<Cpu>& context, int64_t count, const std::function<void(Context<Cpu>&, int64_t i)>& work) {
  context.products->each_alone(count, [&](int64_t i, CpuProducts& own) {
    Context<Cpu> alone = context;
    alone.products = &own;
    work(alone, i);
  });
}

void each_alone(Context<Cuda>& context, int64_t count, const std::function<void(Context<Cuda>&, int64_t i)>& work) {
  for (int64_t i = 0; i < count; ++i) work(context, i);
}

}  // namespace ftbert
