// Late interaction on packed vectors: which kernel runs a call.
#include "core/check.h"
#include "kernels/kernels.h"
#include "kernels/max_sim/max_sim_mma.cuh"
#include "kernels/max_sim/max_sim_simt.cuh"

namespace ftbert {
namespace {

unsigned blocks_of(const MaxSim& of, int64_t groups) {
  const int64_t blocks = groups * of.document_count;
  FTBERT_CHECK(blocks <= INT32_MAX, "max_sim: ", blocks,
               " blocks are more than one launch can have; pass fewer documents or queries");
  return static_cast<unsigned>(blocks);
}

MaxSimCall call_of(const MaxSim& of, float* scores) {
  return {.queries = static_cast<const char*>(of.queries),
          .documents = static_cast<const char*>(of.documents),
          .cu_queries = of.cu_queries,
          .cu_documents = of.cu_documents,
          .query_of = of.query_of,
          .query_count = static_cast<int>(of.query_count),
          .document_count = static_cast<int>(of.document_count),
          .stride = static_cast<int>(of.width * bytes_of(of.dtype)),
          .scores = scores};
}

// False where a query's vectors do not fit in shared memory.
template <class Shape>
bool run_mma(const Context<Cuda>& context, const MaxSim& of, float* scores) {
  const MaxSimCall call = call_of(of, scores);
  const int chunks = (call.stride / 16 + Shape::kUnits - 1) / Shape::kUnits;
  const int most = std::min(context.shared_bytes, 99 * 1024);  // what every GPU since sm_80 has
  if (Shape::bytes(chunks) > most) return false;
  const int64_t groups = of.query_of ? 1 : (of.query_count + Shape::kQueries - 1) / Shape::kQueries;
  launch_overlapped(context, "kernel max_sim_mma", max_sim_mma<Shape>, blocks_of(of, groups), Shape::kThreads,
                    SharedBytes(Shape::bytes(chunks), most), 1, call, groups, chunks);
  return true;
}

// Rows of whole units of 16 bytes alone.
template <class E>
bool run_on_tensor_cores(const Context<Cuda>& context, const MaxSim& of, float* scores) {
  const bool narrow = of.width * sizeof(E) <= 128, many = !of.query_of && of.query_count >= 4;
  if (context.capability < 80 ||
      !vectorizable(kWidth<E>, of.width, static_cast<const E*>(of.queries), static_cast<const E*>(of.documents)))
    return false;
  if (many && (narrow ? run_mma<MaxSimShape<E, 4, 8>>(context, of, scores)
                      : run_mma<MaxSimShape<E, 4, 16>>(context, of, scores)))
    return true;
  return narrow ? run_mma<MaxSimShape<E, 1, 8>>(context, of, scores)
                : run_mma<MaxSimShape<E, 1, 16>>(context, of, scores);
}

template <class E>
void run(const Context<Cuda>& context, const MaxSim& of, float* scores) {
  if constexpr (sizeof(E) < 4)
    if (run_on_tensor_cores<E>(context, of, scores)) return;
  const int64_t groups = of.query_of ? 1 : of.query_count;
  launch_overlapped(context, "kernel max_sim_simt", max_sim_simt<E>, blocks_of(of, groups), kMaxSimThreads, 0, 1,
                    call_of(of, scores), groups, of.width);
}

}  // namespace

template <>
void max_sim<Cuda>(Context<Cuda>& context, const MaxSim& of, void*, float* scores) {
  if (of.scores() == 0) return;
  FTBERT_CHECK(of.width <= (1 << 24), "max_sim: a vector has at most 2^24 elements, got ", of.width);
  switch (of.dtype) {
    case DType::fp32: return run<float>(context, of, scores);
    case DType::fp16: return run<__half>(context, of, scores);
    case DType::bf16: return run<__nv_bfloat16>(context, of, scores);
    case DType::int8: return run<int8_t>(context, of, scores);
    default: break;
  }
  FTBERT_CHECK(false, "max_sim: expected vectors of fp32, fp16, bf16 or int8, got ", to_string(of.dtype));
}

template <>
size_t max_sim_scratch_bytes<Cuda>(const MaxSim&) {
  return 0;
}

}  // namespace ftbert
