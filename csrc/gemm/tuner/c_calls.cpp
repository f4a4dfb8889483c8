// The tuner in C, for ftbert/tuning/c_calls.py, which calls it by ctypes: no header of Python's, one library for all of
// its versions. Device memory comes as addresses. The core is loaded once in a process, so a table set here is the one
// that its models use.
//
// A call returns 0, or -1 and leaves words in ftbert_error(). Pointers that ..._new functions store belong to the
// caller until ..._free takes them.
#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "gemm/gemm.h"
#include "gemm/table.h"
#include "gemm/tuner/tuner.h"
#include "kernels/kernels.h"

#define FTBERT_C extern "C" [[gnu::visibility("default")]]

namespace ftbert {
namespace {

// An Algorithm with its names; c_calls.py has the same fields.
struct CAlgorithm {
  const OwnKernel* own;  // nullptr: cuBLASLt's
  int32_t variant, tile_rows, tile_columns, split_k, id;
  uint64_t data[8];
  char kernel[32], variant_name[40];
};

// What linear_product is made of. types: of a, b and c.
struct CProduct {
  int64_t m, n, k;
  const char *a, *b, *c, *activation;
  int32_t bias, layernorm, gated, prenorm;
};

// A row of a table. kernel "": data is cuBLASLt's algorithm.
struct CRow {
  CProduct product;
  int64_t from, to;
  const char *kernel, *variant;
  uint64_t data[8];
};

thread_local std::string last_error;

template <class F>
int attempt(const F& f) {
  try {
    f();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return -1;
  }
}

Product linear_product(const CProduct& p) {
  FTBERT_CHECK(!p.layernorm || !p.prenorm, "a product has one norm behind it, of its result or for the next block");
  Epilogue epilogue{
      .bias = p.bias != 0, .activation = parse_activation(p.activation), .gate = p.gated ? Gate::pairs : Gate::none};
  epilogue.residual = p.layernorm || p.prenorm;
  epilogue.after = p.layernorm ? After::norm : p.prenorm ? After::norm_beside : After::nothing;
  return {.m = p.m,
          .n = p.n,
          .k = p.k,
          .a = parse_format(p.a).numbers,
          .b = &parse_format(p.b),
          .c = parse_format(p.c).numbers,
          .epilogue = epilogue};
}

OwnChoice own_choice(const char* kernel, const char* variant) {
  const OwnChoice own = find_own(kernel, variant);
  FTBERT_CHECK(own, "this build has no product ", kernel, " ", variant);
  return own;
}

template <size_t N>
void copy_name(std::string_view name, char (&to)[N]) {
  FTBERT_CHECK(name.size() < N, "a name is longer than its place: ", name);
  std::memcpy(to, name.data(), name.size());
}

CAlgorithm in_c(const Algorithm& algorithm) {
  CAlgorithm c{.own = algorithm.own.kernel,
               .variant = algorithm.own.variant,
               .tile_rows = algorithm.tile.rows,
               .tile_columns = algorithm.tile.columns,
               .split_k = algorithm.tile.split,
               .id = algorithm.id,
               .data = {},
               .kernel = {},
               .variant_name = {}};
  std::copy(algorithm.data.begin(), algorithm.data.end(), c.data);
  if (algorithm.own) {
    copy_name(algorithm.own.kernel->name, c.kernel);
    copy_name(algorithm.own.variant_name(), c.variant_name);
  }
  return c;
}

Algorithm from_c(const CAlgorithm& c) {
  Algorithm algorithm{.own = {c.own, c.variant}, .tile = {c.tile_rows, c.tile_columns, c.split_k}, .data = {}};
  std::copy(std::begin(c.data), std::end(c.data), algorithm.data.begin());
  algorithm.id = c.id;
  return algorithm;
}

// The first `room` of them.
int64_t hand_over(const std::vector<Algorithm>& all, int64_t room, CAlgorithm* out) {
  const int64_t count = std::min<int64_t>(room, static_cast<int64_t>(all.size()));
  for (int64_t i = 0; i < count; ++i) out[i] = in_c(all[i]);
  return count;
}

}  // namespace

FTBERT_C const char* ftbert_error() { return last_error.c_str(); }

// ones: on the device, n of them
FTBERT_C int ftbert_tuner_new(int device, const CProduct* product, void* workspace, const float* ones, Tuner** out) {
  return attempt([&] { *out = make_tuner(device, linear_product(*product), workspace, ones).release(); });
}
FTBERT_C void ftbert_tuner_free(Tuner* tuner) { delete tuner; }

// Of cuBLASLt; count: how many there are of at most `room`.
FTBERT_C int ftbert_tuner_heuristics(Tuner* tuner, int64_t room, CAlgorithm* out, int64_t* count) {
  return attempt([&] { *count = hand_over(tuner->heuristics(static_cast<int>(room)), room, out); });
}
FTBERT_C int ftbert_tuner_own(Tuner* tuner, int64_t room, CAlgorithm* out, int64_t* count) {
  return attempt([&] { *count = hand_over(tuner->own(), room, out); });
}
FTBERT_C int ftbert_tuner_chosen(Tuner* tuner, CAlgorithm* out) {
  return attempt([&] { *out = in_c(tuner->chosen()); });
}
FTBERT_C int ftbert_tuner_c_bytes(const Tuner* tuner, int64_t* bytes) {
  return attempt([&] { *bytes = tuner->c_bytes(); });
}
FTBERT_C int ftbert_tuner_run(Tuner* tuner, const CAlgorithm* algorithm, const void* a, const void* b, const void* bias,
                              void* c) {
  return attempt([&] { tuner->run(from_c(*algorithm), a, b, bias, c); });
}

// out: nullptr for an algorithm that cannot run after all. The tuner must outlive it.
FTBERT_C int ftbert_recording_new(Tuner* tuner, const CAlgorithm* algorithm, const void* a, const void* b,
                                  int64_t weights, const void* bias, void* c, Recording** out) {
  return attempt([&] { *out = tuner->record(from_c(*algorithm), a, b, weights, bias, c).release(); });
}
FTBERT_C int ftbert_recording_microseconds(Recording* recording, double* us) {
  return attempt([&] { *us = recording->microseconds(); });
}
FTBERT_C void ftbert_recording_free(Recording* recording) { delete recording; }

FTBERT_C int ftbert_set_table(int device, const CRow* rows, int64_t count) {
  return attempt([&] {
    std::vector<TunedRow> table;
    for (const CRow& row : std::span(rows, static_cast<size_t>(count))) {
      TunedRow& made =
          table.emplace_back(TunedRow{.product = linear_product(row.product), .from = row.from, .to = row.to});
      if (*row.kernel) made.own = own_choice(row.kernel, row.variant);
      std::copy(std::begin(row.data), std::end(row.data), made.algorithm.begin());
    }
    set_table(device, table);
  });
}

// A line for each kernel of ours: its name and those of its variants, between tabs.
FTBERT_C const char* ftbert_own_kernels() {
  static const std::string text = [] {
    std::string lines;
    for (const OwnKernel* kernel : own_kernels()) {
      lines += kernel->name;
      for (const OwnVariant& variant : kernel->variants) lines.append("\t").append(variant.name());
      lines += "\n";
    }
    return lines;
  }();
  return text.c_str();
}
// gpu: c_calls.py has the same fields; yes: 0 or 1
FTBERT_C int ftbert_supports(const Gpu* gpu, const char* kernel, const char* variant, const CProduct* product,
                             int* yes) {
  return attempt([&] {
    const OwnChoice own = own_choice(kernel, variant);
    *yes = own.kernel->can(*gpu, own.variant, linear_product(*product));
  });
}
// What guess_product says: without names cuBLASLt's first proposal.
FTBERT_C int ftbert_guess(const Gpu* gpu, const CProduct* product, CAlgorithm* found) {
  return attempt([&] {
    Algorithm algorithm{};
    algorithm.own = guess_product(*gpu, linear_product(*product));
    if (algorithm.own) algorithm.tile = algorithm.own.kernel->variants[algorithm.own.variant].tile;
    *found = in_c(algorithm);
  });
}
FTBERT_C int ftbert_is_known(const char* kernel, const char* variant) { return is_known(kernel, variant); }
FTBERT_C int ftbert_check_product(const CProduct* product) {
  return attempt([&] { linear_product(*product); });
}
FTBERT_C int64_t ftbert_rows(int64_t m) { return cuda_gemm_rows(m); }  // the m that the encoder runs
FTBERT_C int ftbert_fuses_heads_of(int64_t size) { return FusedHeads::has(size); }
FTBERT_C int ftbert_workspace_bytes(int device, int64_t* bytes) {
  return attempt([&] { *bytes = static_cast<int64_t>(gemm_workspace_bytes(device)); });
}

}  // namespace ftbert
