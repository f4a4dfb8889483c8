// How the CPU cuts the sequences of a call: into passes, and into shares of threads.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace ftbert {

// On the CPU a layer runs over runs of sequences of about this many tokens, so that what a run makes stays in the
// last-level cache while the layer's weights are used again from there. A GPU takes all tokens at once.
inline constexpr int64_t kCpuPassTokens = 768;

// Where threads can have sequences of their own they meet once a call, not at each kernel; with about so many tokens
// each at least. (A product's last rows, which nobody reads, may be those that another thread is writing.)
inline constexpr int64_t kLeastShare = 128;

// Of the sequences from `first` to before `last`, whole ones, greedily, up to `most` tokens; one may be longer than
// that.
template <class Pass>
std::vector<Pass> make_passes(const int32_t* cu_seqlens, int64_t first, int64_t last, int64_t most) {
  std::vector<Pass> passes;
  int64_t begin = first;
  for (int64_t b = first; b < last; ++b) {
    const int64_t start = cu_seqlens[begin], end = cu_seqlens[b + 1];
    if (end - start > most && b > begin) {
      const int64_t cut = cu_seqlens[b];
      if (cut > start) passes.push_back({begin, b - begin, start, cut - start});
      begin = b;
    }
  }
  const int64_t start = cu_seqlens[begin], end = cu_seqlens[last];
  if (end > start) passes.push_back({begin, last - begin, start, end - start});
  return passes;
}

inline int64_t share_pass_tokens(int64_t shares) { return std::max(kCpuPassTokens / shares, kLeastShare); }

// Where to cut the sequences so that each of `count` threads has about as many tokens, [count + 1]; empty where one
// would have a tenth more than its share, or all too few for products.
inline std::vector<int64_t> equal_shares(const int32_t* cu_seqlens, int64_t batch, int64_t tokens, int64_t count) {
  if (count < 2 || tokens < count * kLeastShare) return {};
  std::vector<int64_t> cuts{0};
  for (int64_t i = 1; i <= count; ++i) {
    const auto aim = static_cast<int32_t>(tokens * i / count);
    int64_t at = std::lower_bound(cu_seqlens, cu_seqlens + batch + 1, aim) - cu_seqlens;
    if (at > 0 && aim - cu_seqlens[at - 1] < cu_seqlens[at] - aim) --at;
    if (i == count) at = batch;
    if (10 * count * (cu_seqlens[at] - cu_seqlens[cuts.back()]) > 11 * tokens) return {};
    cuts.push_back(at);
  }
  return cuts;
}

}  // namespace ftbert
